// A save that copies late lets go of the write barrier and of its memory however it ends: replaced, refused, failed,
// interrupted, with a lost peer, or with its saver.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "late_copy_fixture.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

TEST_F(LateCopyTest, AReplacedSaveGivesItsMemoryBackAndAsksForNothing) {
    Guarded guarded(3);
    Saver saver(nullptr, dir_.path(), options());
    const WorkPtr second = save_behind_another(saver, guarded);
    const WorkPtr third = saver.save_async(3, guarded.owned.state);
    EXPECT_TRUE(second->done());
    for (const char* name : {"w0", "w1", "w2", "small"}) {
        guarded.barrier->before_write(guarded.memory(name));
        overwrite(guarded.memory(name));
    }
    busy_.open();
    saver.wait();
    expect_released(guarded);
    saver.trim();
    EXPECT_EQ(saver.staging_size(), 0);
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 3);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, ARefusedSaveAsksForNothing) {
    Guarded guarded(3);
    SaverOptions refusing = options();
    refusing.when_busy = WhenBusy::refuse;
    Saver saver(nullptr, dir_.path(), refusing);
    (void)saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();  // by then all of the first one is copied
    EXPECT_EQ(error_of([&] { (void)saver.save_async(2, guarded.owned.state); }).code(), Code::not_ready);
    guarded.owned.fill(1);
    busy_.open();
    saver.wait();
    expect_released(guarded);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, ASaveThatFailsReleasesTheBarrierAndTheFormerCheckpointStands) {
    for (const char* operation : {"mkdir", "create", "write", "fsync", "rename"}) {
        const TempDir dir;
        Guarded guarded(3);
        FaultyFiles files;
        SaverOptions failing = options();
        failing.progress = nullptr;
        failing.files = &files;
        Saver saver(nullptr, dir.path(), failing);
        saver.save(1, guarded.owned.state);
        std::atomic<int> failures{0};
        files.on_call = [&](int64_t, const std::string& name) {
            if (!name.starts_with(operation)) return;
            ++failures;
            throw os_error("the disk is full", ENOSPC);
        };
        const WorkPtr work = saver.save_async(2, guarded.owned.state);
        guarded.barrier->before_write_all();
        guarded.owned.poison();
        EXPECT_EQ(error_of([&] { saver.wait(); }).code(), Code::io) << operation;
        EXPECT_GT(failures, 0) << operation;
        files.on_call = nullptr;
        expect_released(guarded);
        EXPECT_EQ(saved_differences(dir.path(), guarded), 0) << operation;
    }
}

TEST_F(LateCopyTest, ACallThatIsInterruptedReleasesTheBarrier) {
    Guarded guarded(3);
    SaverOptions throwing = options();
    throwing.progress = [](Phase phase, int64_t, int64_t) {
        if (phase == Phase::stage) throw Error(Code::interrupted, "the test wants no more");
    };
    Saver saver(nullptr, dir_.path(), throwing);
    (void)saver.save_async(1, guarded.owned.state);
    EXPECT_EQ(error_of([&] { saver.wait(); }).code(), Code::interrupted);
    expect_released(guarded);
}

TEST_F(LateCopyTest, ALostPeerReleasesTheBarrier) {
    const Outcomes outcomes = run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        Guarded guarded(3);
        Saver saver(comm, dir_.path(), options());
        if (comm->rank() == 1) busy_.open();
        (void)saver.save_async(1, guarded.owned.state);
        if (comm->rank() == 1) comm->abort("the test leaves");
        guarded.barrier->before_write_all();
        EXPECT_NE(error_of([&] { saver.wait(); }).code(), Code::ok);
        expect_released(guarded);
    });
    expect_all_well(outcomes);
}

TEST_F(LateCopyTest, ASaverDestroyedInItsCallbackReleasesWhatWasQueued) {
    Guarded guarded(3);
    auto saver = std::make_unique<Saver>(nullptr, dir_.path(), options());
    const WorkPtr first = saver->save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const WorkPtr second = saver->save_async(2, guarded.owned.state);
    std::promise<void> destroyed;
    first->on_done([&](const std::optional<Error>&) {
        saver.reset();
        destroyed.set_value();
    });
    busy_.open();
    ASSERT_EQ(destroyed.get_future().wait_for(patience(std::chrono::seconds(60))), std::future_status::ready);
    expect_released(guarded);
    EXPECT_TRUE(second->done());
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 1);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, ADestroyedSaverSavesWhatIsLeftToCopy) {
    Guarded guarded(3);
    {
        Saver saver(nullptr, dir_.path(), options());
        (void)save_behind_another(saver, guarded);
        busy_.open();
    }
    expect_released(guarded);
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 2);
    EXPECT_EQ(saved_differences(guarded), 0);
}

}  // namespace
}  // namespace tsr::testing
