#include "tensor/write_barrier.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

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
    for (const auto& [begin, end] :
         {std::pair<size_t, size_t>{0, 5}, {9, 12}, {29, 31}, {20, 60}, {60, 61}, {70, 71}}) {
        EXPECT_FALSE(barrier.owns(part(begin, end))) << begin;
    }
}

// Takes others, and itself, away while it is asked.
class Leaves final : public LateCopy {
   public:
    explicit Leaves(WriteBarrier& barrier) : barrier_(barrier) {}
    void copy_now(Memory) noexcept override {
        ++times_asked;
        for (const LateCopy* copy : leave) barrier_.remove(copy);
    }
    std::vector<const LateCopy*> leave;
    int times_asked = 0;

   private:
    WriteBarrier& barrier_;
};

TEST(WriteBarrierTest, AsksEachOfThoseWhoStayThoughOthersLeaveMeanwhile) {
    const std::array<std::byte, 8> memory{};
    for (int leaving = 0; leaving < 8; ++leaving) {
        WriteBarrier barrier({Memory(memory)});
        std::vector<std::shared_ptr<Leaves>> copies;
        for (int i = 0; i < 3; ++i) copies.push_back(std::make_shared<Leaves>(barrier));
        for (const auto& copy : copies) {
            barrier.add(copy);
            for (int i = 0; i < 3; ++i) {
                if ((leaving >> i & 1) != 0) copy->leave.push_back(copies[static_cast<size_t>(i)].get());
            }
        }
        barrier.before_write(memory);
        for (int i = 0; i < 3; ++i) {
            if ((leaving >> i & 1) == 0) {
                EXPECT_GE(copies[static_cast<size_t>(i)]->times_asked, 1) << leaving << i;
            }
        }
    }
}

TEST(WriteBarrierTest, AForkedChildAsksNobody) {
    const std::array<std::byte, 8> memory{};
    WriteBarrier barrier({Memory(memory)});
    const auto copy = std::make_shared<Asked>();
    barrier.add(copy);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        barrier.before_write_all();
        ::_exit(copy->asked.empty() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    barrier.before_write_all();
    EXPECT_EQ(copy->asked.size(), 1u);
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
