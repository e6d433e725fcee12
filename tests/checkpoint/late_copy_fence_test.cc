// The fence of a save that copies late. It is done when everything is copied, before the save is durable; from then on
// anybody may write to the memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/save/staging.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "late_copy_fixture.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

// From the fence on the memory is anybody's, though not a byte is written yet.
TEST_P(LateCopyOfFormat, WhatIsWrittenAfterTheFenceIsNotSaved) {
    Guarded guarded(5);
    FaultyFiles files;
    SaverOptions slow = options(GetParam());
    slow.progress = nullptr;
    slow.files = &files;
    Saver saver(nullptr, dir_.path(), slow);
    std::promise<void> open;
    const std::shared_future<void> opened = open.get_future().share();
    files.on_call = [&](int64_t, const std::string& name) {
        if (!name.starts_with("mkdir") && !name.starts_with("create")) return;
        EXPECT_EQ(opened.wait_for(patience(std::chrono::seconds(60))), std::future_status::ready);
    };
    const auto save = saver.save_async(1, guarded.owned.state);
    save->staged()->wait(Deadline::in(patience(milliseconds{60000})));
    EXPECT_FALSE(save->done());
    guarded.owned.poison();  // without a word to the barrier
    open.set_value();
    saver.wait();
    expect_released(guarded);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_P(LateCopyOfFormat, TheFenceComesBeforeTheEndOfASlowSave) {
    Guarded guarded(2);
    SaverOptions slow = options(GetParam());
    std::atomic<int64_t> written{0};
    slow.progress = [&](Phase phase, int64_t done, int64_t) {
        if (phase == Phase::write) written = done;
    };
    slow.write_bytes_per_s = 32 << 20;
    std::mutex mutex;
    std::vector<std::string> order;
    std::promise<void> both;
    const auto tell = [&](const char* what) {
        return [&, what](const std::optional<Error>& error) {
            EXPECT_FALSE(error.has_value());
            const std::lock_guard lock(mutex);
            order.emplace_back(what);
            if (order.size() == 2) both.set_value();
        };
    };
    Saver saver(nullptr, dir_.path(), slow);
    const auto save = saver.save_async(1, guarded.owned.state);
    save->on_done(tell("durable"));
    save->staged()->on_done([&](const std::optional<Error>& error) {
        EXPECT_EQ(written, 0) << "the first byte is written when all is copied";
        tell("staged")(error);
    });
    ASSERT_EQ(both.get_future().wait_for(patience(std::chrono::seconds(60))), std::future_status::ready);
    saver.wait();
    EXPECT_THAT(order, ::testing::ElementsAre("staged", "durable"));
    EXPECT_EQ(saved_differences(guarded), 0);
}

// w0 shares its chunk with half of w1; what lies in other chunks is still to be copied.
// The save has not begun: its only copies are those that writes ask for.
TEST_F(LateCopyTest, TheFenceWaitsForTheLastTensorThatIsLeftToCopy) {
    Guarded guarded(3);
    Saver saver(nullptr, dir_.path(), options());
    (void)saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const auto save = saver.save_async(2, guarded.owned.state);
    std::thread::id told;
    save->staged()->on_done([&](const std::optional<Error>&) { told = std::this_thread::get_id(); });
    for (const char* name : {"w1", "w0"}) {
        guarded.barrier->before_write(guarded.memory(name));
        EXPECT_FALSE(save->staged()->done()) << name;
    }
    guarded.barrier->before_write(guarded.memory("w2"));
    EXPECT_TRUE(save->staged()->done());
    EXPECT_EQ(told, std::this_thread::get_id());
    EXPECT_FALSE(save->done());
    guarded.owned.poison();
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, WithoutTheOptionOrBeyondTheBoundTheFenceIsDoneWhenTheCallReturns) {
    Guarded guarded(5);
    for (const bool is_ring : {false, true}) {
        const TempDir dir;
        SaverOptions copying = options();
        copying.progress = nullptr;
        if (is_ring) copying.staging_bytes = 2 * chunk_bytes;
        if (!is_ring) copying.copies = Copies::at_once;
        Saver saver(nullptr, dir.path(), copying);
        const auto save = saver.save_async(1, guarded.owned.state);
        EXPECT_TRUE(save->staged()->done()) << is_ring;
        EXPECT_FALSE(save->staged()->error().has_value()) << is_ring;
        saver.wait();
    }
}

TEST_F(LateCopyTest, ASaveThatEndsBeforeItsFenceGivesItItsError) {
    Guarded guarded(3);
    Saver saver(nullptr, dir_.path(), options());
    (void)saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const auto replaced = saver.save_async(2, guarded.owned.state);
    const auto third = saver.save_async(3, guarded.owned.state);
    EXPECT_TRUE(replaced->staged()->done());
    EXPECT_EQ(error_of([&] { replaced->staged()->wait(Deadline::in(milliseconds{1000})); }).code(), Code::aborted);
    EXPECT_FALSE(third->staged()->done());
    busy_.open();
    saver.wait();
    EXPECT_FALSE(third->staged()->error().has_value());

    SaverOptions throwing = options();
    throwing.progress = [](Phase phase, int64_t, int64_t) {
        if (phase == Phase::stage) throw Error(Code::interrupted, "the test wants no more");
    };
    Saver interrupted(nullptr, dir_ / "other", throwing);
    const auto save = interrupted.save_async(1, guarded.owned.state);
    EXPECT_EQ(error_of([&] { interrupted.wait(); }).code(), Code::interrupted);
    EXPECT_EQ(error_of([&] { save->staged()->wait(Deadline::in(milliseconds{1000})); }).code(), Code::interrupted);
}

}  // namespace
}  // namespace tsr::testing
