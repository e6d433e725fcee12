// What savers promise: commits in order, retention, saves in the background, and a resume that never goes back to an
// older save in silence.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "checkpoint/root/root.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "new_threads.hpp"
#include "saver_fixture.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

TEST_F(SaverTest, ResumeIsZeroWhereNothingIsYet) {
    Saver saver(nullptr, dir_ / "not/yet/there", saver_options());
    EXPECT_EQ(saver.resume(owned_.state), 0);
}

TEST_F(SaverTest, LatestNamesTheNewestAndPathsFollowIt) {
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(10, owned_.state);
    saver.save(20, owned_.state);
    EXPECT_TRUE(slurp(dir_ / "latest").starts_with("step-00000020-"));
    EXPECT_EQ(Checkpoint::open(dir_ / "latest")->manifest().step, 20);
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 20);
    // It is a hint: the scan decides.
    spill(dir_ / "latest", "step-00000099-00000000\n");
    EXPECT_EQ(Checkpoint::open(dir_ / "latest")->manifest().step, 20);
    std::filesystem::remove(dir_ / "latest");
    EXPECT_EQ(Checkpoint::open(dir_ / "latest")->manifest().step, 20);
}

// Where it is not certain what the newest save is, resume says so: it neither begins anew nor goes back in silence.
TEST_F(SaverTest, ResumeNeverPassesOverADamagedSaveThatMayBeTheNewest) {
    const auto manifest_of = [&](int step) {
        for (const SavedStep& save : scan_root(posix_file_system(), dir_.path())) {
            if (save.step == step) return dir_ / (save.directory + "/manifest.json");
        }
        throw std::runtime_error("no such save");
    };
    const auto refuses = [&](const std::string& named) {
        Saver saver(nullptr, dir_.path(), saver_options());
        const Error error = error_of([&] { (void)saver.resume(owned_.state); });
        EXPECT_EQ(error.code(), Code::corrupt) << error.what();
        EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("`tessera ckpt verify` checks one in full"), std::string::npos);
        EXPECT_NE(std::string(error.what()).find("move the damaged one out of " + dir_.path()), std::string::npos)
            << error.what();
    };
    std::string latest;
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        saver.save(10, owned_.state);
        latest = slurp(dir_ / "latest");
        saver.save(20, owned_.state);
    }
    const std::string damaged = manifest_of(20);
    spill(damaged, "");
    refuses(damaged);  // `latest` names it
    std::filesystem::remove(dir_ / "latest");
    refuses(damaged);  // nothing tells which is the newest
    // The newest by `latest` is sound, so the damaged one is an older one.
    spill(dir_ / "latest", latest);
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        EXPECT_EQ(saver.resume(owned_.state), 10);
    }
    const std::string last = manifest_of(10);
    spill(last, "");
    std::filesystem::remove(dir_ / "latest");
    refuses(last);  // and the other: no save is left
    std::filesystem::remove(last);
    std::filesystem::remove(damaged);
    spill(dir_ / "latest", latest);
    refuses("latest");  // there was a save, and it is gone
}

TEST_F(SaverTest, NewestIsTheLastCommittedEvenAfterGoingBack) {
    SaverOptions options = saver_options();
    options.retention.latest = 2;
    Saver saver(nullptr, dir_.path(), options);
    saver.save(100, owned_.state);
    saver.save(200, owned_.state);
    saver.save(150, owned_.state);  // the job went back to 100 and came this far
    EXPECT_EQ(saver.resume(owned_.state), 150);
    saver.save(160, owned_.state);
    EXPECT_EQ(committed(dir_.path()), (Steps{"150", "160"}));
}

TEST_F(SaverTest, RetentionKeepsTheNewestAndTouchesNothingElse) {
    SaverOptions options = saver_options();
    options.retention.latest = 2;
    std::filesystem::create_directory(dir_ / "notes");
    spill(dir_ / "notes/step.txt", "mine");
    std::filesystem::create_directory(dir_ / "step-00000001-abcdef01.copy");
    Saver saver(nullptr, dir_.path(), options);
    for (int step = 1; step <= 4; ++step) saver.save(step, owned_.state);
    EXPECT_EQ(committed(dir_.path()), (Steps{"3", "4"}));
    EXPECT_EQ(slurp(dir_ / "notes/step.txt"), "mine");
    EXPECT_TRUE(std::filesystem::exists(dir_ / "step-00000001-abcdef01.copy"));
}

TEST_F(SaverTest, AnotherSaveOfTheSameStepIsAnotherCheckpoint) {
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(5, owned_.state);
    saver.save(5, owned_.state);
    EXPECT_EQ(committed(dir_.path()), (Steps{"5", "5"}));
}

// What a manifest grows by, by `more` of something: bytes each, for what docs/FORMAT.md allows.
TEST_F(SaverTest, AManifestTakesAtMost80BytesATensorBeyondItsNameAnd64AFile) {
    const auto manifest_bytes = [&](int ranks, int tensors) {
        const TempDir dir;
        expect_all_well(run_meeting(ranks, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            const Placement rows = Placement::shard(0);
            const Dims shape{ranks * 16, 8};
            const Layout layout = Layout::placed(shape, std::span(&ranks, 1), std::span(&rows, 1));
            for (int i = 0; i < tensors; ++i) {
                owned.add_sharded({fmt::format("{:04}", i), DType::bf16, shape}, layout, comm->rank());
            }
            Saver saver(comm, dir.path(), saver_options());
            saver.save(1, owned.state);
        }));
        return static_cast<int64_t>(std::filesystem::file_size(only_save(dir.path()) + "/manifest.json"));
    };
    const int64_t few = manifest_bytes(2, 20);
    EXPECT_LE(manifest_bytes(2, 220) - few, 200 * (80 + 4));
    EXPECT_LE(manifest_bytes(4, 20) - few, 2 * 64 + 20 * 4) << "and of each tensor a digit or two of its shape";
}

// --- background ---

TEST_F(SaverTest, ABackgroundSaveHoldsWhatTheStateWasWhenItWasCalled) {
    expect_all_well(run_meeting(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"large", DType::f32, {2000, 1000}});
        owned.add_whole({"small", DType::u8, {7}});
        owned.state.set_value("epoch", Json(int64_t{1}));
        Saver saver(comm, dir_.path(), saver_options());
        for (uint64_t round = 1; round <= 3; ++round) {
            owned.fill(round);
            const WorkPtr work = saver.save_async(static_cast<int64_t>(round), owned.state);
            owned.poison();
            saver.wait();
            EXPECT_TRUE(work->done());
            EXPECT_EQ(saver.resume(owned.state), static_cast<int64_t>(round));
            EXPECT_EQ(owned.differences(round), 0);
        }
    }));
}

TEST_F(SaverTest, ABackgroundErrorIsToldOnceByTheNextCall) {
    FaultyFiles files(Fault::none);
    SaverOptions options = saver_options();
    options.files = &files;
    Saver saver(nullptr, dir_.path(), options);
    saver.save(1, owned_.state);
    files.on_call = [](int64_t, const std::string& name) {
        if (name.starts_with("mkdir")) throw os_error("cannot create it", ENOSPC);
    };
    const WorkPtr work = saver.save_async(2, owned_.state);
    EXPECT_EQ(error_of([&] { work->wait(soon()); }).code(), Code::io);
    EXPECT_EQ(error_of([&] { saver.save(3, owned_.state); }).code(), Code::io);
    files.on_call = nullptr;
    EXPECT_NO_THROW(saver.save(4, owned_.state));
    EXPECT_EQ(saver.resume(owned_.state), 4);
}

TEST_F(SaverTest, DestroyWaitsForTheSaveInFlight) {
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        (void)saver.save_async(1, owned_.state);
    }
    EXPECT_EQ(committed(dir_.path()), (Steps{"1"}));
    EXPECT_FALSE(std::filesystem::exists(dir_ / ".owner"));
}

TEST_F(SaverTest, ACompletionCallbackMayDestroyItsSaver) {
    std::promise<Code> waited;
    std::promise<void> gone;
    // The save stops before its commit until the callback is there, so that it runs on the saver's own thread.
    std::promise<void> registered;
    FaultyFiles files;
    files.on_call = [&, ready = registered.get_future().share()](int64_t, const std::string& name) {
        if (name.ends_with("manifest.json") && name.starts_with("rename")) ready.wait();
    };
    SaverOptions options = saver_options();
    options.files = &files;
    auto saver = std::make_unique<Saver>(nullptr, dir_.path(), options);
    Saver* raw = saver.get();
    const WorkPtr work = saver->save_async(5, owned_.state);
    work->on_done([&](const std::optional<Error>&) {
        waited.set_value(error_of([&] { raw->wait(); }).code());
        saver.reset();
        gone.set_value();
    });
    registered.set_value();
    EXPECT_EQ(waited.get_future().get(), Code::invalid_state);
    gone.get_future().wait();
    EXPECT_FALSE(std::filesystem::exists(dir_ / ".owner"));
    EXPECT_EQ(committed(dir_.path()), (Steps{"5"}));
}

// They belong to the program: a thread of the library must not take what the program's own threads wait for.
TEST_F(SaverTest, TheThreadsOfASaverTakeNoSignals) {
    const NewThreads threads;
    Saver saver(nullptr, dir_.path(), saver_options());
    threads.expect_no_signals_taken("tsr-lease");
    (void)saver.save_async(1, owned_.state);
    threads.expect_no_signals_taken("tsr-saver");
}

}  // namespace
}  // namespace tsr::testing
