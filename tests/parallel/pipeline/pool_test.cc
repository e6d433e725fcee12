#include "parallel/pipeline/pool.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "resident.hpp"

namespace tsr::pipeline {
namespace {

TEST(Pool, GivesFreedMemoryAgainToWhatFits) {
    const auto pool = std::make_shared<Pool>(cpu_device());
    auto large = pool->take(100000);
    auto small = pool->take(9000);
    std::byte* const large_data = large.get();
    std::byte* const small_data = small.get();
    large.reset();
    small.reset();
    EXPECT_EQ(pool->take(10000).get(), small_data) << "the smallest that fits";
    EXPECT_EQ(pool->take(90000).get(), large_data);
    const auto tiny = pool->take(1);
    EXPECT_NE(tiny.get(), small_data) << "of 12288 bytes, more than half would be idle";
    EXPECT_NE(tiny.get(), large_data);
    EXPECT_NE(pool->take(0).get(), nullptr);
}

TEST(Pool, KnowsHowMuchWasInUse) {
    const auto pool = std::make_shared<Pool>(cpu_device());
    pool->begin_step();
    const auto first = pool->take(4096);
    pool->take(8192).reset();
    EXPECT_EQ(pool->peak_bytes(), 12288U);
    pool->begin_step();
    EXPECT_EQ(pool->peak_bytes(), 4096U);
}

TEST(Pool, FreesWhatNoStepUses) {
    const auto pool = std::make_shared<Pool>(cpu_device());
    pool->begin_step();
    std::byte* const data = pool->take(4096).get();
    std::memset(data, 7, 4096);
    for (int step = 0; step < 8; ++step) pool->begin_step();
    auto again = pool->take(4096);
    EXPECT_EQ(again.get(), data);
    EXPECT_EQ(*again, std::byte{7}) << "the same pages";
    again.reset();
    for (int step = 0; step < 9; ++step) pool->begin_step();
    EXPECT_EQ(*pool->take(4096), std::byte{0}) << "new pages";
}

struct Event final : DeviceEvent {
    bool is_over = false;
    [[nodiscard]] bool done() const override { return is_over; }
    void wait(Deadline /*deadline*/) const override {}
};

TEST(Pool, MemoryComesBackWithWhatStillUsesIt) {
    const auto pool = std::make_shared<Pool>(cpu_device());
    const auto read = std::make_shared<Event>();
    auto memory = pool->take(4096);
    std::byte* const data = memory.get();
    pool->add_use(data, read);
    memory.reset();
    for (int step = 0; step < 9; ++step) pool->begin_step();
    memory = pool->take(4096);
    EXPECT_EQ(memory.get(), data) << "idle for long, but still used";
    memory.reset();  // without a look at its uses, as of an empty tensor
    memory = pool->take(4096);
    EXPECT_EQ(pool->former_uses(data), std::vector<EventPtr>{read});
    EXPECT_TRUE(pool->former_uses(data).empty());
    pool->add_use(data, read);
    memory.reset();
    read->is_over = true;
    for (int step = 0; step < 9; ++step) pool->begin_step();
    memory = pool->take(4096);
    EXPECT_TRUE(pool->former_uses(memory.get()).empty());
}

// A stage that writes its first activations waits for no page.
TEST(Pool, MemoryIsResidentBeforeItIsWritten) {
    constexpr size_t size = size_t{40} << 20;  // more than the allocator has at hand
    const auto pool = std::make_shared<Pool>(cpu_device());
    EXPECT_FALSE(testing::is_resident({cpu_device().allocate_zeroed(size).get(), size}));
    EXPECT_TRUE(testing::is_resident({pool->take(size).get(), size}));
}

TEST(Pool, RefusesWhatTheDeviceHasNot) {
    const auto pool = std::make_shared<Pool>(cpu_device());
    pool->begin_step();
    try {
        static_cast<void>(pool->take(std::numeric_limits<size_t>::max() / 4));
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::no_memory);
    }
    EXPECT_EQ(pool->take(1) != nullptr, true);
    pool->begin_step();
    EXPECT_EQ(pool->peak_bytes(), 0U) << "nothing is counted for the one that failed";
}

TEST(Pool, OutlivesItsOwnerWhileItsMemoryIsUsed) {
    auto pool = std::make_shared<Pool>(cpu_device());
    const auto memory = pool->take(4096);
    pool.reset();
    *memory = std::byte{1};
    EXPECT_EQ(*memory, std::byte{1});
}

}  // namespace
}  // namespace tsr::pipeline
