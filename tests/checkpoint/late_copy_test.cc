// Saves that copy what an optimizer owns late. They save what the state was when save_async was called, whatever is
// written later.
#include <gtest/gtest.h>

#include <vector>

#include "checkpoint/save/staging.hpp"
#include "fixture.hpp"
#include "late_copy_fixture.hpp"

namespace tsr::testing {
namespace {

// The small tensors lie in chunks with the large ones' parts.
TEST_P(LateCopyOfFormat, WhatIsWrittenAfterTheBarrierIsNotSaved) {
    Guarded guarded(5);
    Saver saver(nullptr, dir_.path(), options(GetParam()));
    (void)save_behind_another(saver, guarded);
    overwrite(guarded.memory("other"));  // nobody's: copied at once
    // In another order than the file's, and not all.
    for (const char* name : {"w3", "w0", "small", "w4"}) {
        guarded.barrier->before_write(guarded.memory(name));
        overwrite(guarded.memory(name));
    }
    busy_.open();
    saver.wait();
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 2);
    EXPECT_EQ(saved_differences(guarded), 0);
    expect_released(guarded);
}

INSTANTIATE_TEST_SUITE_P(Formats, LateCopyOfFormat, ::testing::Values(SaveFormat::native, SaveFormat::torch_dcp));

TEST_F(LateCopyTest, TheCallReturnsBeforeAnythingOfTheBarriersIsCopied) {
    Guarded guarded(3, false);
    Saver saver(nullptr, dir_.path(), options());
    (void)save_behind_another(saver, guarded);
    guarded.owned.fill(1);  // behind the barrier's back: the save, which has not begun, sees it
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(guarded, 1), 0);
}

TEST_F(LateCopyTest, AWriteCopiesItsOwnTensorAlone) {
    Guarded guarded(6);
    Saver saver(nullptr, dir_.path(), options());
    (void)save_behind_another(saver, guarded);
    guarded.barrier->before_write(guarded.memory("w0"));
    guarded.owned.fill(1);  // behind the barrier's back
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences_of("w0", 0), 0);
    for (const char* name : {"w3", "w4", "w5"}) EXPECT_EQ(saved_differences_of(name, 1), 0) << name;
}

TEST_F(LateCopyTest, WithoutTheOptionAllIsCopiedBeforeTheCallReturns) {
    Guarded guarded(3);
    SaverOptions at_once = options();
    at_once.copies = Copies::at_once;
    Saver saver(nullptr, dir_.path(), at_once);
    (void)save_behind_another(saver, guarded);
    guarded.owned.fill(1);
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, ProgressTellsWhatIsCopiedBeforeTheCallReturns) {
    Guarded guarded(3);
    SaverOptions telling = options();
    std::vector<int64_t> totals;
    telling.progress = [&](Phase phase, int64_t, int64_t total) {
        if (phase == Phase::stage) totals.push_back(total);
    };
    Saver saver(nullptr, dir_.path(), telling);
    (void)saver.save_async(1, guarded.owned.state);
    saver.wait();
    ASSERT_FALSE(totals.empty());
    for (const int64_t total : totals) EXPECT_EQ(total, static_cast<int64_t>(guarded.memory("other").size()));
}

TEST_F(LateCopyTest, ALoadIntoTheStateWaitsForTheCopies) {
    Guarded guarded(3);
    {
        Guarded other(3);
        other.owned.fill(7);
        Saver elsewhere(nullptr, dir_ / "elsewhere", saver_options());
        elsewhere.save(1, other.owned.state);
    }
    Saver saver(nullptr, dir_ / "root", options());
    (void)save_behind_another(saver, guarded);
    (void)Checkpoint::open(dir_ / "elsewhere")->load(guarded.owned.state);
    EXPECT_EQ(guarded.owned.differences(7), 0);
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(dir_ / "root", guarded), 0);
}

TEST_F(LateCopyTest, TwoSaversOfOneOptimizerEachSaveTheTimeOfTheirCall) {
    Guarded guarded(3);
    Busy busy_of_other;
    SaverOptions of_other = options();
    of_other.progress = busy_of_other.progress();
    Saver one(nullptr, dir_ / "one", options());
    Saver other(nullptr, dir_ / "other", of_other);
    (void)save_behind_another(one, guarded);
    (void)other.save_async(1, guarded.owned.state);
    busy_of_other.wait_until_reached();
    const auto write = [&](const char* name) {
        guarded.barrier->before_write(guarded.memory(name));
        overwrite(guarded.memory(name));
    };
    write("w1");
    (void)other.save_async(2, guarded.owned.state);
    for (const char* name : {"w0", "w2", "small"}) write(name);
    busy_of_other.open();
    busy_.open();
    one.wait();
    other.wait();
    expect_released(guarded);
    EXPECT_EQ(saved_differences(dir_ / "one", guarded), 0);
    EXPECT_EQ(saved_differences(dir_ / "other", guarded), rows * 1000) << "all but w1, which was written before";
}

TEST_F(LateCopyTest, AStateLargerThanTheStagingMemoryIsCopiedAtOnce) {
    Guarded guarded(5);
    SaverOptions bounded = options();
    bounded.staging_bytes = 2 * chunk_bytes;
    bounded.progress = nullptr;
    Saver saver(nullptr, dir_.path(), bounded);
    (void)saver.save_async(1, guarded.owned.state);
    guarded.owned.fill(1);
    saver.wait();
    expect_released(guarded);
    EXPECT_LE(saver.staging_size(), bounded.staging_bytes);
    EXPECT_EQ(saved_differences(guarded), 0);
}

}  // namespace
}  // namespace tsr::testing
