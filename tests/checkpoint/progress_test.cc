// What a save costs others and what it reports: its bytes per second, the priority of its threads, its progress.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "async_fixture.hpp"
#include "base/clock.hpp"
#include "checkpoint/io/progress.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;

TEST_F(AsyncTest, WritingKeepsToItsLimit) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {4 << 20}});
    SaverOptions options = saver_options();
    options.write_bytes_per_s = 16 << 20;  // no disk is as slow
    Saver saver(nullptr, dir_.path(), options);
    const auto begin = Clock::now();
    saver.save(1, owned.state);
    // Four chunks of a quarter of a second; the first goes at once.
    EXPECT_GE(Clock::now() - begin, milliseconds{740});
}

// Its threads wait for their turns meanwhile, at this rate for more than an hour.
TEST_F(AsyncTest, ALimitedSaveIsInterruptedWhileItWaitsToWrite) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {4 << 20}});
    for (const int threads : {1, 4}) {
        SaverOptions options = saver_options();
        options.retention.latest = 1;
        options.write.threads = threads;
        options.write_bytes_per_s = 1024;
        Saver saver(nullptr, dir_.path(), options);
        auto until = Clock::now() + milliseconds{300};
        set_interrupt([](void* at) { return Clock::now() > *static_cast<Clock::time_point*>(at) ? 1 : 0; }, &until);
        const Error error = error_of([&] { saver.save(1, owned.state); });
        set_interrupt(nullptr, nullptr);
        EXPECT_EQ(error.code(), Code::interrupted) << error.what();
        EXPECT_LT(Clock::now() - until, patience(std::chrono::seconds{20})) << threads << " threads";

        OwnedState small;  // does not wait for what was not written
        small.add_whole({"small", DType::f32, {10}});
        saver.save(threads, small.state);
        EXPECT_THAT(steps(), ElementsAre(threads));
    }
}

TEST_F(AsyncTest, BackgroundThreadsHaveALowPriorityByOption) {
    FaultyFiles files;
    std::atomic<int> background{-100};
    std::atomic<int64_t> of_disk{-1};  // class and level, as ioprio_set(2) has them
    const auto disk_priority = [] { return ::syscall(SYS_ioprio_get, 1, 0); };
    files.on_call = [&](int64_t, const std::string& name) {
        if (!name.starts_with("write") || !name.ends_with(".safetensors")) return;
        background = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
        of_disk = disk_priority();
    };
    SaverOptions options = saver_options();
    options.files = &files;
    options.priority = Priority::low;
    Saver saver(nullptr, dir_.path(), options);
    const int own = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
    const int64_t own_of_disk = disk_priority();
    EXPECT_EQ(code_of(saver.save_async(1, owned_.state)), Code::ok);
    EXPECT_EQ(background, std::max(own, 10));
    EXPECT_EQ(of_disk, (2 << 13) | 7) << "best effort, the lowest level";
    saver.wait();
    saver.save(2, owned_.state);
    EXPECT_EQ(background, own);
    EXPECT_EQ(of_disk, own_of_disk);
}

struct Told {
    Phase phase;
    int64_t done;
    int64_t total;
    bool on_caller;
};

TEST(Progress, ThatAllIsDoneIsToldOnce) {
    std::vector<int64_t> told;
    Progress progress([&](Phase, int64_t done, int64_t) { told.push_back(done); }, Phase::write, 10);
    const auto until_told = [&](size_t count) {
        for (const auto end = Clock::now() + patience(std::chrono::seconds(10));
             told.size() < count && Clock::now() < end;) {
            progress.poll();
        }
    };
    progress.add(4);
    until_told(2);
    progress.add(6);
    for (const auto end = Clock::now() + 2 * poll_slice; Clock::now() < end;) progress.poll();
    progress.finish();
    EXPECT_EQ(told, (std::vector<int64_t>{0, 4, 10}));
}

TEST_F(AsyncTest, ProgressIsToldOnTheThreadsThatAreDocumented) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {8 << 20}});
    constexpr int64_t bytes = int64_t{32} << 20;
    std::mutex mutex;
    std::vector<Told> told;
    const auto caller = std::this_thread::get_id();
    const ProgressFn tell = [&](Phase phase, int64_t done, int64_t total) {
        const std::lock_guard lock(mutex);
        told.push_back({phase, done, total, std::this_thread::get_id() == caller});
    };
    SaverOptions options = saver_options();
    options.progress = tell;
    options.write_bytes_per_s = 100 << 20;  // long enough to be told in between
    Saver saver(nullptr, dir_.path(), options);
    const auto of = [&](Phase phase) {
        std::vector<Told> found;
        for (const Told& one : told) {
            if (one.phase == phase) found.push_back(one);
        }
        return found;
    };
    const auto expect_whole = [&](Phase phase, bool on_caller, int64_t total) {
        const auto found = of(phase);
        ASSERT_GE(found.size(), 2u) << static_cast<int>(phase);
        EXPECT_EQ(found.front().done, 0);
        EXPECT_EQ(found.back().done, total);
        int64_t last = 0;
        for (const Told& one : found) {
            EXPECT_EQ(one.total, total);
            EXPECT_EQ(one.on_caller, on_caller);
            EXPECT_GE(one.done, last);
            last = one.done;
        }
    };
    (void)saver.save_async(1, owned.state);
    saver.wait();
    expect_whole(Phase::stage, true, bytes);
    expect_whole(Phase::write, false, bytes);
    expect_whole(Phase::commit, false, 0);
    EXPECT_GE(of(Phase::write).size(), 3u);
    EXPECT_LE(of(Phase::write).size(), 40u);
    told.clear();
    saver.save(2, owned.state);
    expect_whole(Phase::write, true, bytes);
    EXPECT_TRUE(of(Phase::stage).empty());
    told.clear();
    EXPECT_EQ(saver.resume(owned.state), 2);
    expect_whole(Phase::read, true, bytes);
    told.clear();
    const auto checkpoint = Checkpoint::open(dir_.path());
    checkpoint->check(Checkpoint::Depth::everything, tell);
    expect_whole(Phase::verify, true, checkpoint->manifest().size_bytes());
}

}  // namespace
}  // namespace tsr::testing
