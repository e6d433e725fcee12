#include "tensor/write_barrier.hpp"

#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

namespace tsr::testing {
namespace {

class Asked final : public LateCopy {
   public:
    void copy_now(Memory memory) noexcept override { asked.push_back(memory.data()); }
    std::vector<const std::byte*> asked;
};

TEST(WriteBarrierTest, OwnsWhatLiesWithinItsMemoryAndNeighboursAreOne) {
    const std::array<std::byte, 100> memory{};
    const auto part = [&](size_t begin, size_t end) { return Memory(memory).subspan(begin, end - begin); };
    const WriteBarrier barrier({part(50, 60), part(10, 20), part(20, 30), part(70, 70)});
    for (const auto& [begin, end] : {std::pair<size_t, size_t>{10, 30}, {15, 25}, {50, 60}, {59, 60}}) {
        EXPECT_TRUE(barrier.owns(part(begin, end))) << begin;
    }
    for (const auto& [begin, end] : {std::pair<size_t, size_t>{0, 5}, {9, 12}, {29, 31}, {20, 60}, {60, 61}, {70, 71}}) {
        EXPECT_FALSE(barrier.owns(part(begin, end))) << begin;
    }
}

TEST(WriteBarrierTest, AsksThoseWhoCopyUntilTheyAreGone) {
    const std::array<std::byte, 8> memory{};
    WriteBarrier barrier({Memory(memory).first(2), Memory(memory).subspan(4, 2)});
    const auto first = std::make_shared<Asked>();
    const auto second = std::make_shared<Asked>();
    barrier.before_write(Memory(memory).first(1));
    barrier.add(first);
    barrier.add(second);
    barrier.before_write(Memory(memory).first(1));
    barrier.remove(first.get());
    barrier.remove(first.get());
    barrier.before_write_all();
    EXPECT_EQ(first->asked, std::vector<const std::byte*>({memory.data()}));
    EXPECT_EQ(second->asked, std::vector<const std::byte*>({memory.data(), memory.data(), memory.data() + 4}));
    EXPECT_EQ(first.use_count(), 1);
}

}  // namespace
}  // namespace tsr::testing
