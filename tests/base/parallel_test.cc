#include "base/parallel.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "new_threads.hpp"
#include "patience.hpp"

namespace tsr {
namespace {

TEST(RunParallel, EveryTaskRunsOnceOnAWorkerInRange) {
    for (const int threads : {-1, 1, 3, 50}) {
        std::vector<std::atomic<int>> runs(1000);
        std::atomic<bool> in_range{true};
        run_parallel(runs.size(), threads, [&](size_t task, int worker) {
            ++runs[task];
            if (worker < 0 || worker >= std::max(threads, 1)) in_range = false;
        });
        EXPECT_TRUE(in_range);
        for (const auto& count : runs) ASSERT_EQ(count, 1);
    }
    run_parallel(0, 4, [](size_t, int) { FAIL(); });
}

TEST(RunParallel, TheFirstErrorStopsTheRestAndIsThrown) {
    // More tasks than can ever be done: that it returns at all shows that the rest was stopped.
    constexpr size_t endless = std::numeric_limits<size_t>::max() / 2;
    try {
        run_parallel(endless, 4, [&](size_t task, int) {
            if (task == 10) throw Error(Code::io, "task 10");
        });
        FAIL();
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "task 10");
    }
}

TEST(RunParallel, AnInterruptEndsIt) {
    set_interrupt([](void*) -> int32_t { return 1; }, nullptr);
    for (const int threads : {1, 2}) {
        std::atomic<bool> release{false};
        try {
            run_parallel(1000000, threads, [&](size_t, int) {
                const Deadline deadline = Deadline::in(milliseconds{1});
                while (!release && !deadline.expired()) {
                }
            });
            ADD_FAILURE() << "not interrupted";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::interrupted);
        }
    }
    set_interrupt(nullptr, nullptr);
}

TEST(RunParallel, ItsThreadsTakeNoSignals) {
    const testing::NewThreads threads;
    run_parallel(2, 2, [&](size_t, int) { threads.expect_no_signals_taken("tsr-worker"); });
}

// Without it the call returned when the last wait was over.
TEST(RunParallel, ATaskThatWaitsIsInterruptedWhenAnotherFails) {
    std::atomic<int> waiting{0};
    std::atomic<int> interrupted{0};
    const Deadline deadline = Deadline::in(testing::patience(std::chrono::seconds{60}));
    EXPECT_THROW(run_parallel(3, 3,
                              [&](size_t task, int) {
                                  if (task == 0) {
                                      wait_until([&] { return waiting == 2; }, deadline, "the other tasks");
                                      throw Error(Code::io, "the first error");
                                  }
                                  ++waiting;
                                  try {
                                      wait_until([] { return false; }, deadline, "an interrupt");
                                  } catch (const Error& error) {
                                      if (error.code() == Code::interrupted) ++interrupted;
                                      throw;
                                  }
                              }),
                 Error);
    EXPECT_EQ(interrupted, 2);
}

}  // namespace
}  // namespace tsr
