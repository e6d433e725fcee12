// The two ways to store what another rank reads next: the same bytes, and the faster one is found.
#include "comm/shm/stores.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace tsr::shm {
namespace {

TEST(Stores, PastTheCachesTheSameBytesArriveAndNoOthers) {
    std::vector<std::byte> from(1000);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
    std::vector<std::byte> to(1200);
    for (const size_t offset : {0, 1, 15, 16, 17, 63, 64, 65}) {
        for (const size_t n : {0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 900}) {
            for (const size_t source : {0, 1, 8}) {
                std::fill(to.begin(), to.end(), std::byte{0});
                copy_streaming(to.data() + offset, from.data() + source, n);
                fence_streams();
                for (size_t i = 0; i < to.size(); ++i) {
                    const bool inside = i >= offset && i < offset + n;
                    ASSERT_EQ(to[i], inside ? from[source + i - offset] : std::byte{0})
                        << offset << " " << n << " " << i;
                }
            }
        }
    }
}

// A clock that is moved by what the stores would take.
Clock::time_point simulated_time;
Clock::time_point simulated_now() { return simulated_time; }

constexpr size_t slots = 8;
constexpr int enough = 100;  // segments for a trial

class StoresLearn : public ::testing::Test {
   protected:
    // Microseconds a segment.
    int through = 3;
    int past = 7;
    Stores stores{slots, simulated_now};

    void take() { simulated_time += std::chrono::microseconds(stores.stream() ? past : through); }
    void collective(Collective which, int segments) {
        stores.begin_collective();
        for (int i = 0; i < segments; ++i) {
            stores.stage(1 << 16);
            take();
            stores.lap(which, i > 0);
        }
        stores.end_collective(which);
    }
};

TEST_F(StoresLearn, ThroughTheCachesWhereThatIsFaster) {
    collective(Collective::broadcast, enough);
    EXPECT_FALSE(stores.stream());
}

TEST_F(StoresLearn, PastThemWhereThatIsFaster) {
    through = 35;
    collective(Collective::broadcast, enough);
    EXPECT_TRUE(stores.stream());
}

TEST_F(StoresLearn, FromCollectivesOfOneSegmentToo) {
    through = 35;
    for (int i = 0; i < enough; ++i) collective(Collective::all_reduce, 1);
    EXPECT_TRUE(stores.stream());
}

// The first segments after a change are as fast as the other way left them.
TEST_F(StoresLearn, FromWhatComesAfterAChange) {
    bool streamed = false;
    size_t since = 0;
    stores.begin_collective();
    for (int i = 0; i < enough; ++i) {
        stores.stage(1 << 16);
        since = stores.stream() == streamed ? since + 1 : 0;
        streamed = stores.stream();
        simulated_time += std::chrono::microseconds(since < slots ? 1 : streamed ? 7 : 35);
        stores.lap(Collective::all_gather, i > 0);
    }
    EXPECT_TRUE(stores.stream());
}

TEST_F(StoresLearn, AnewWhenThreadsHaveMoved) {
    collective(Collective::all_reduce, enough);
    EXPECT_FALSE(stores.stream());
    through = 35;
    for (int i = 0; i < 6000 && !stores.stream(); ++i) collective(Collective::all_reduce, 10);
    collective(Collective::all_reduce, enough);
    EXPECT_TRUE(stores.stream());
}

// A trial that began with what never comes again is given up.
TEST_F(StoresLearn, FromWhateverComes) {
    through = 35;
    collective(Collective::scatter, 10);
    for (int i = 0; i < 200; ++i) collective(Collective::all_gather, 10);
    EXPECT_TRUE(stores.stream());
}

}  // namespace
}  // namespace tsr::shm
