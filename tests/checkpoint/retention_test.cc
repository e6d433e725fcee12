// Which saves stay under a root: the newest, the best by a metric, every n-th step, and what is being read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <new>

#include "checkpoint/root/lease.hpp"
#include "checkpoint/root/retention.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RetentionTest : public ::testing::Test {
   protected:
    RetentionTest() { owned_.add_whole({"w", DType::f32, {100}}); }

    SaverOptions keeping(int latest, int best, int64_t every, Better better = Better::lower) {
        SaverOptions options = saver_options();
        options.retention = {latest, best, BestRule{"loss", better}, every};
        return options;
    }
    void save(Saver& saver, int64_t step, double loss) {
        owned_.state.set_metric("loss", loss);
        saver.save(step, owned_.state);
    }
    std::vector<int64_t> steps() {
        std::vector<int64_t> found;
        for (const SavedStep& save : scan_root(posix_file_system(), dir_.path())) found.push_back(save.step);
        return found;
    }
    int64_t best_step() { return Checkpoint::open(dir_ / "best")->manifest().step; }

    TempDir dir_;
    OwnedState owned_;
};

TEST_F(RetentionTest, TheUnionOfNewestBestAndEveryStays) {
    Saver saver(nullptr, dir_.path(), keeping(2, 2, 100));
    const std::vector<std::pair<int64_t, double>> saves{{50, 0.9},  {100, 0.8}, {150, 0.2}, {200, 0.5},
                                                        {250, 0.1}, {300, 0.7}, {350, 0.6}, {360, 0.65}};
    for (const auto& [step, loss] : saves) save(saver, step, loss);
    EXPECT_THAT(steps(), ElementsAre(100, 150, 200, 250, 300, 350, 360));
    EXPECT_EQ(best_step(), 250);
    EXPECT_EQ(Checkpoint::open(dir_ / "latest")->manifest().step, 360);
    EXPECT_THAT(slurp(dir_ / "best"), HasSubstr("\nlower loss\n"));
}

TEST_F(RetentionTest, HigherMayBeBetterAndOfEqualOnesTheNewer) {
    Saver saver(nullptr, dir_.path(), keeping(1, 1, 0, Better::higher));
    save(saver, 1, 0.5);
    save(saver, 2, 0.7);
    save(saver, 3, 0.7);
    save(saver, 4, -std::numeric_limits<double>::infinity());
    EXPECT_THAT(steps(), ElementsAre(3, 4));
    EXPECT_EQ(best_step(), 3);
}

// A job evaluates now and then, and saves more often: the saves between have no metric, and none of them is the best.
TEST_F(RetentionTest, AMetricIsOfItsSaveAlone) {
    Saver saver(nullptr, dir_.path(), keeping(1, 1, 0));
    save(saver, 1, 0.5);
    saver.save(2, owned_.state);
    (void)saver.save_async(3, owned_.state);
    saver.wait();
    EXPECT_THAT(steps(), ElementsAre(1, 3));
    EXPECT_EQ(best_step(), 1);
    EXPECT_TRUE(Checkpoint::open(dir_ / "latest")->manifest().metrics.empty());
    // A save that fails has taken it too.
    owned_.state.set_metric("loss", 0.25);
    EXPECT_EQ(error_of([&] { saver.save(-1, owned_.state); }).code(), Code::invalid_argument);
    saver.save(4, owned_.state);
    EXPECT_EQ(best_step(), 1);
}

TEST_F(RetentionTest, WhatHasNoNumberIsNeverTheBest) {
    Saver saver(nullptr, dir_.path(), keeping(1, 1, 0));
    saver.save(1, owned_.state);
    EXPECT_EQ(error_of([&] { (void)best_step(); }).code(), Code::not_found);
    save(saver, 2, std::nan(""));
    EXPECT_EQ(error_of([&] { (void)best_step(); }).code(), Code::not_found);
    save(saver, 3, 7.0);
    save(saver, 4, std::nan(""));
    EXPECT_THAT(steps(), ElementsAre(3, 4));
    EXPECT_EQ(best_step(), 3);
}

TEST_F(RetentionTest, TheBestStaysEvenIfNoneIsAskedFor) {
    Saver saver(nullptr, dir_.path(), keeping(1, 0, 0));
    save(saver, 1, 0.1);
    save(saver, 2, 0.2);
    save(saver, 3, 0.3);
    EXPECT_THAT(steps(), ElementsAre(1, 3));
}

// The file is for people; the truth is the scan, by the rule that the file tells.
TEST_F(RetentionTest, BestFollowsTheScanAndItsRule) {
    {
        Saver saver(nullptr, dir_.path(), keeping(0, 0, 0));
        save(saver, 1, 0.1);
        save(saver, 2, 0.2);
    }
    spill(dir_ / "best", "step-00000099-00000000\nlower loss\n");
    EXPECT_EQ(best_step(), 1);
    spill(dir_ / "best", "-\nhigher loss\n");
    EXPECT_EQ(best_step(), 2);
    spill(dir_ / "best", "-\nhigher accuracy\n");
    EXPECT_THAT(error_of([&] { (void)best_step(); }).what(), HasSubstr("has no best save"));
    spill(dir_ / "best", "step-00000099-00000000\n");
    EXPECT_EQ(error_of([&] { (void)best_step(); }).code(), Code::corrupt);
    std::filesystem::remove(dir_ / "best");
    EXPECT_THAT(error_of([&] { (void)best_step(); }).what(), HasSubstr("best_metric"));
}

TEST_F(RetentionTest, AFileOfTorchSaveMayBeNamedBest) {
    spill(dir_ / "best", "PK\x03\x04 and more");
    const Found found = resolve_checkpoint(posix_file_system(), dir_ / "best");
    EXPECT_EQ(found.format, Format::torch_save);
    EXPECT_EQ(found.path, dir_ / "best");
}

TEST_F(RetentionTest, MetricsAreFoundInAManifestOfAnyForm) {
    Saver saver(nullptr, dir_.path(), keeping(0, 0, 0));
    owned_.state.set_value("text", Json(std::string("\n\"metrics\":{\"loss\":0.5},\n") + std::string(100'000, 'x')));
    owned_.state.set_metric("a \"metrics\":{", 3.0);
    save(saver, 1, 0.25);
    const auto saves = rank_saves(posix_file_system(), dir_.path(), scan_root(posix_file_system(), dir_.path()),
                                  BestRule{"loss", Better::lower});
    ASSERT_EQ(saves.size(), 1u);
    EXPECT_EQ(saves[0].metric, 0.25);
    // More metrics than the end of the file that is read: the whole manifest is.
    for (int i = 0; i < 4000; ++i) owned_.state.set_metric("metric number " + std::to_string(i), i);
    save(saver, 2, 0.125);
    EXPECT_EQ(best_step(), 2);
}

TEST_F(RetentionTest, AnOpenCheckpointIsNotRemoved) {
    Saver saver(nullptr, dir_.path(), keeping(1, 0, 0));
    owned_.fill(1);
    saver.save(1, owned_.state);
    auto reader = Checkpoint::open(dir_.path());
    auto other = Checkpoint::open(dir_.path());
    owned_.fill(2);
    saver.save(2, owned_.state);
    EXPECT_THAT(steps(), ElementsAre(1, 2));
    EXPECT_EQ(reader->load(owned_.state).missing.size(), 0u);
    EXPECT_EQ(owned_.differences(1), 0);
    reader.reset();
    saver.save(3, owned_.state);
    EXPECT_THAT(steps(), ElementsAre(1, 3)) << "the second reader is still there";
    other.reset();
    saver.save(4, owned_.state);
    EXPECT_THAT(steps(), ElementsAre(4));
}

TEST_F(RetentionTest, WhatCannotBeRemovedKeepsNothingElse) {
    // In place of a file a directory, which nobody unlinks.
    const std::string left = dir_ / "step-00000000-deadbeef";
    std::filesystem::create_directories(left + "/rank-00000.safetensors");
    Holder dead = Holder::this_process("dead");
    dead.start_time -= 1;
    spill(left + "/.writing", dead.dump());
    std::filesystem::create_directory(dir_ / "latest");
    Saver saver(nullptr, dir_.path(), keeping(1, 0, 0));
    for (int64_t step = 1; step <= 3; ++step) save(saver, step, 4.0 - static_cast<double>(step));
    EXPECT_THAT(steps(), ElementsAre(0, 3));
    EXPECT_TRUE(std::filesystem::exists(left));
    EXPECT_EQ(best_step(), 3);
}

// Not even what is no error of the file system, such as a want of memory.
TEST_F(RetentionTest, NothingThatFailsAfterTheCommitTakesTheSaveBack) {
    FaultyFiles files;
    SaverOptions options = keeping(1, 0, 0);
    options.files = &files;
    Saver saver(nullptr, dir_.path(), options);
    save(saver, 1, 2.0);
    bool committed = false;
    files.on_call = [&](int64_t, const std::string& name) {
        committed = committed || name == "rename " + (dir_ / "latest");
        if (committed && name == "list " + dir_.path()) throw std::bad_alloc();
    };
    save(saver, 2, 1.0);
    EXPECT_TRUE(committed);
    files.on_call = nullptr;
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 2);
    save(saver, 3, 0.5);
    EXPECT_THAT(steps(), ElementsAre(3));
}

// Another program looks for the newest or the best save, while each save of the job replaces both.
TEST_F(RetentionTest, ARootIsOpenedWhateverIsSavedMeanwhile) {
    SaverOptions of_torch = keeping(1, 1, 0);
    of_torch.format = SaveFormat::torch_dcp;
    for (const SaverOptions& options : {keeping(1, 1, 0), of_torch}) {
        const std::string root = dir_ / std::to_string(static_cast<int>(options.format));
        Saver saver(nullptr, root, options);
        int64_t step = 0;
        const auto save_next = [&] {
            ++step;
            save(saver, step, -static_cast<double>(step));
        };
        save_next();
        for (const char* name : {"", "/latest", "/best"}) {
            int64_t calls = 1;
            for (int64_t at = 0; at < calls; ++at) {
                FaultyFiles files;
                files.on_call = [&](int64_t call, const std::string&) {
                    if (call == at) save_next();
                };
                const int64_t before = step;
                const auto checkpoint = Checkpoint::open(root + name, files);
                EXPECT_GE(checkpoint->manifest().step, before) << at;
                EXPECT_NO_THROW((void)checkpoint->load(owned_.state)) << at;
                calls = files.calls();
            }
            EXPECT_GT(calls, 10);
        }
    }
}

TEST_F(RetentionTest, PyTorchsFormatIsKeptAndRemovedAlike) {
    SaverOptions options = saver_options();
    options.retention = {1, 1, BestRule{"loss", Better::lower}, 0};
    options.format = SaveFormat::torch_dcp;
    Saver saver(nullptr, dir_.path(), options);
    save(saver, 1, 0.5);
    auto reader = Checkpoint::open(dir_.path());
    save(saver, 2, 0.25);
    EXPECT_THAT(steps(), ElementsAre(1, 2)) << "the first is open";
    reader.reset();
    save(saver, 3, 0.75);
    EXPECT_THAT(steps(), ElementsAre(2, 3));
    EXPECT_EQ(best_step(), 2);
}

TEST_F(RetentionTest, AReaderInAnotherProcessCountsUntilItDies) {
    Saver saver(nullptr, dir_.path(), keeping(1, 0, 0));
    saver.save(1, owned_.state);
    int ready[2];
    int end[2];
    ASSERT_EQ(::pipe(ready), 0);
    ASSERT_EQ(::pipe(end), 0);
    const pid_t child = ::fork();
    if (child == 0) {
        ::close(end[1]);
        const auto reader = Checkpoint::open(dir_.path());
        char byte = 'r';
        (void)!::write(ready[1], &byte, 1);
        (void)!::read(end[0], &byte, 1);  // until the parent closes its end, or dies
        ::_exit(0);
    }
    ::close(end[0]);
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    saver.save(2, owned_.state);
    EXPECT_THAT(steps(), ElementsAre(1, 2));
    ::close(end[1]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    saver.save(3, owned_.state);
    EXPECT_THAT(steps(), ElementsAre(3));
    ::close(ready[0]);
    ::close(ready[1]);
}

TEST_F(RetentionTest, WhatIsBeingRemovedCannotBeOpened) {
    Saver saver(nullptr, dir_.path(), keeping(0, 0, 0));
    saver.save(1, owned_.state);
    const std::string save = only_save(dir_.path());
    const auto remover = open_file(posix_file_system(), save + "/manifest.json", OpenMode::read);
    ASSERT_EQ(remover->lock(FileLock::exclusive), 0);
    EXPECT_THAT(error_of([&] { (void)Checkpoint::open(save); }).what(), HasSubstr("is being removed"));
}

// Somebody moved a save to another disk, or means harm: what a link leads to is not the root's.
TEST_F(RetentionTest, ALinkInPlaceOfASaveIsReadAndNeverEmptied) {
    const TempDir elsewhere;
    Saver saver(nullptr, dir_.path(), keeping(1, 0, 0));
    owned_.fill(1);
    saver.save(1, owned_.state);
    const std::string save = only_save(dir_.path());
    std::filesystem::rename(save, elsewhere / "moved");
    std::filesystem::create_directory_symlink(elsewhere / "moved", save);
    // And one whose manifest is missing, with the mark of a dead writer.
    Holder dead = Holder::this_process("dead");
    dead.start_time -= 1;
    std::filesystem::create_directory(elsewhere / "begun");
    spill(elsewhere / "begun/rank-00000.safetensors", "not of this root");
    spill(elsewhere / "begun/.writing", dead.dump());
    std::filesystem::create_directory_symlink(elsewhere / "begun", dir_ / "step-00000007-0123abcd");

    EXPECT_EQ(Checkpoint::open(save)->load(owned_.state).missing.size(), 0u);
    EXPECT_EQ(owned_.differences(1), 0);
    saver.save(2, owned_.state);
    saver.save(3, owned_.state);
    EXPECT_TRUE(std::filesystem::is_symlink(save));
    EXPECT_TRUE(std::filesystem::exists(elsewhere / "moved/manifest.json"));
    EXPECT_TRUE(std::filesystem::exists(elsewhere / "moved/rank-00000.safetensors"));
    EXPECT_FALSE(std::filesystem::exists(elsewhere / "moved/.writing"));
    EXPECT_EQ(slurp(elsewhere / "begun/rank-00000.safetensors"), "not of this root");
    EXPECT_EQ(newest_save(posix_file_system(), dir_.path()).value_or("").substr(0, 13), "step-00000003");
}

TEST_F(RetentionTest, WhatCannotBeMeantIsRefused) {
    const auto refused = [&](const Retention& retention) {
        SaverOptions options = saver_options();
        options.retention = retention;
        const Error error = error_of([&] { Saver saver(nullptr, dir_.path(), options); });
        EXPECT_EQ(error.code(), Code::invalid_argument);
        return std::string(error.what());
    };
    EXPECT_THAT(refused({-1, 0, std::nullopt, 0}), HasSubstr("keep_latest is -1"));
    EXPECT_THAT(refused({1, -2, std::nullopt, 0}), HasSubstr("keep_best is -2"));
    EXPECT_THAT(refused({1, 0, std::nullopt, -3}), HasSubstr("keep_every is -3"));
    EXPECT_THAT(refused({1, 2, std::nullopt, 0}), HasSubstr("best_metric"));
    EXPECT_THAT(refused({1, 2, BestRule{"", Better::lower}, 0}), HasSubstr("best_metric is empty"));
    EXPECT_THAT(refused({0, 0, std::nullopt, 10}), HasSubstr("keep_latest is 0, which keeps all"));
}

}  // namespace
}  // namespace tsr::testing
