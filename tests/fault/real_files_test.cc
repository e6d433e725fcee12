// Failures and deaths at any file operation of a save once more, on the real file system: what is on disk afterwards is
// what a real failure leaves. errors_test.cc and crash_test.cc do more of them, in memory.
#include <gtest/gtest.h>

#include <unistd.h>

#include <array>
#include <set>

#include "checkpoint/fixture.hpp"
#include "checkpoint/root/root.hpp"
#include "fault/faulty_files.hpp"
#include "mounted.hpp"

namespace tsr::testing {
namespace {

void build(OwnedState& owned) {
    owned.add_whole({"model.weight", DType::f32, {300, 7}});
    owned.add_whole({"model.bias", DType::f64, {5}});
    owned.state.set_value("epoch", Json(int64_t{1}));
}

// One thread a file: the order of calls is the same in every run.
SaverOptions options_with(FileSystem& files) {
    SaverOptions options = saver_options();
    options.files = &files;
    options.write.threads = 1;
    options.retention.latest = 2;
    return options;
}

// Which of the two saves (salts 1 and 2) the newest checkpoint holds; 0: none, or damaged.
uint64_t newest_content(const std::string& root) {
    try {
        const auto checkpoint = Checkpoint::open(root);
        checkpoint->check(Checkpoint::Depth::everything);
        OwnedState owned;
        build(owned);
        (void)checkpoint->load(owned.state);
        for (const uint64_t salt : {1, 2}) {
            if (owned.differences(salt) == 0 && checkpoint->manifest().step == static_cast<int64_t>(salt)) return salt;
        }
    } catch (const Error& error) {
        ADD_FAILURE() << error.what();
    }
    return 0;
}

// What a process that died leaves is judged dead by the next: here the "process" is this test, so say so by hand.
void forget_owner(const std::string& root) {
    std::filesystem::remove(root + "/.owner");
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
        const std::string lease = entry.path().string() + "/.writing";
        if (!std::filesystem::exists(lease)) continue;
        Holder holder = Holder::this_process("gone");
        holder.start_time -= 1;
        spill(lease, holder.dump());
    }
}

struct Second {
    int64_t calls = 0;
    std::optional<Error> error;  // of the second save
};

// Saves salt 1 with sound files and salt 2 with `files`.
Second two_saves(const std::string& root, FaultyFiles& files) {
    OwnedState owned;
    build(owned);
    owned.fill(1);
    {
        Saver first(nullptr, root, saver_options());
        first.save(1, owned.state);
    }
    Second run;
    owned.fill(2);
    try {
        Saver second(nullptr, root, options_with(files));
        second.save(2, owned.state);
    } catch (const Error& error) {
        run.error = error;
    }
    run.calls = files.calls();
    return run;
}

std::ptrdiff_t open_descriptors() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
}

TEST(SaveFaults, AnyCallMayFailWithAnyErrorAndTheFormerCheckpointStays) {
    const std::ptrdiff_t descriptors = open_descriptors();
    int64_t calls = 0;
    {
        const TempDir dir;
        FaultyFiles files;
        const Second run = two_saves(dir.path(), files);
        ASSERT_FALSE(run.error);
        calls = run.calls;
        ASSERT_EQ(newest_content(dir.path()), 2u);
    }
    ASSERT_GT(calls, 30);
    std::set<std::string> told;
    for (int64_t at = 0; at < calls; ++at) {
        const int error_number = std::array{ENOSPC, EIO, EDQUOT}[static_cast<size_t>(at % 3)];
        const TempDir dir;
        FaultyFiles files(Fault::error, at, error_number);
        const Second run = two_saves(dir.path(), files);
        SCOPED_TRACE(::testing::Message()
                     << "call " << at << " (" << files.failed_call() << ") errno " << error_number);
        if (run.error) {
            EXPECT_EQ(newest_content(dir.path()), 1u) << run.error->what();
            EXPECT_NE(run.error->code(), Code::internal) << run.error->what();
            told.insert(std::string(code_name(run.error->code())));
        } else {
            // The failing call was one that a save can do without.
            EXPECT_EQ(newest_content(dir.path()), 2u);
        }
        // Nothing stands in the way of the next save.
        forget_owner(dir.path());
        OwnedState owned;
        build(owned);
        owned.fill(2);
        Saver again(nullptr, dir.path(), saver_options());
        EXPECT_NO_THROW(again.save(2, owned.state));
        EXPECT_EQ(newest_content(dir.path()), 2u);
    }
    EXPECT_TRUE(told.contains("IO"));
    EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(SaveFaults, DeathAtAnyCallLeavesTheOldOrTheNewCheckpoint) {
    int64_t calls = 0;
    {
        const TempDir dir;
        FaultyFiles files;
        calls = two_saves(dir.path(), files).calls;
    }
    int old_ones = 0;
    int new_ones = 0;
    for (int64_t at = 0; at < calls; ++at) {
        SCOPED_TRACE("death at call " + std::to_string(at));
        const TempDir dir;
        FaultyFiles files(Fault::crash, at);
        (void)two_saves(dir.path(), files);
        const uint64_t content = newest_content(dir.path());
        EXPECT_NE(content, 0u);
        ++(content == 1 ? old_ones : new_ones);

        // A new job takes the root over, resumes, and its next save collects what was left.
        forget_owner(dir.path());
        OwnedState owned;
        build(owned);
        Saver next(nullptr, dir.path(), saver_options());
        EXPECT_EQ(next.resume(owned.state), static_cast<int64_t>(content));
        next.save(3, owned.state);
        for (const SavedStep& save : scan_root(posix_file_system(), dir.path())) {
            EXPECT_TRUE(save.committed) << save.directory << " was left behind";
        }
    }
    EXPECT_GT(old_ones, 0);
    EXPECT_GT(new_ones, 0);
}

TEST(SaveFaults, ShortAndInterruptedTransfersAreCarriedOn) {
    const TempDir dir;
    FaultyFiles files(Fault::shorten);
    const Second run = two_saves(dir.path(), files);
    EXPECT_FALSE(run.error) << run.error->what();
    EXPECT_EQ(newest_content(dir.path()), 2u);
    OwnedState owned;
    build(owned);
    (void)Checkpoint::open(dir.path(), files)->load(owned.state);
    EXPECT_EQ(owned.differences(2), 0);
}

TEST(SaveFaults, AFailedFsyncIsNotTriedAgain) {
    const TempDir dir;
    std::vector<std::string> names;
    FaultyFiles probe;
    probe.on_call = [&](int64_t, const std::string& name) { names.push_back(name); };
    (void)two_saves(dir.path(), probe);
    const auto fsync_of = [](const std::string& name) {
        return name.starts_with("fsync ") && name.ends_with(".safetensors");
    };
    const auto at = std::find_if(names.begin(), names.end(), fsync_of) - names.begin();
    ASSERT_LT(at, static_cast<std::ptrdiff_t>(names.size()));

    const TempDir other;
    FaultyFiles files(Fault::error, at, EIO);
    int fsyncs = 0;
    files.on_call = [&](int64_t, const std::string& name) { fsyncs += fsync_of(name) ? 1 : 0; };
    const Second run = two_saves(other.path(), files);
    ASSERT_TRUE(run.error);
    EXPECT_EQ(run.error->code(), Code::io);
    EXPECT_EQ(run.error->record()->native_code, EIO);
    EXPECT_NE(std::string(run.error->what()).find("rank-00000.safetensors"), std::string::npos) << run.error->what();
    EXPECT_EQ(fsyncs, 1);
}

TEST(SaveFaults, EveryRankGetsTheErrorOfTheRankThatFailed) {
    const TempDir dir;
    FaultyFiles sound;
    // Rank 2's disk fills up while it writes its file.
    FaultyFiles full;
    const Outcomes outcomes = run_meeting(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        for (const char* name : {"a", "b", "c", "d", "e", "f"}) owned.add_whole({name, DType::f32, {40000}});
        owned.fill();
        SaverOptions options = saver_options();
        options.plan.pack_bytes = 1000;
        FaultyFiles broken(Fault::error, 3, ENOSPC);  // root and save are held, the file is made, and room is reserved
        if (comm->rank() == 2) options.files = &broken;
        Saver saver(comm, dir.path(), options);
        saver.save(1, owned.state);
    });
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
        ASSERT_TRUE(outcomes[rank]) << rank;
        EXPECT_EQ(outcomes[rank]->code(), Code::io);
        EXPECT_EQ(outcomes[rank]->record()->rank, 2);
        EXPECT_EQ(outcomes[rank]->record()->native_code, ENOSPC);
        EXPECT_STREQ(outcomes[rank]->what(), outcomes[0]->what());
    }
    EXPECT_NE(std::string(outcomes[0]->what()).find("rank 2: cannot reserve"), std::string::npos)
        << outcomes[0]->what();
    EXPECT_TRUE(scan_root(posix_file_system(), dir.path()).empty()) << "the failed save was not removed";
}

// A real full disk, where the test may mount one.
TEST(SaveFaults, AFullDiskIsToldAndTheFormerCheckpointStays) {
    const TempDir dir;
    const Mounted small_disk("tmpfs", dir / "small", "size=3m");
    if (!small_disk.is_there()) return;  // without the right to mount, the injected ENOSPC above is the test
    OwnedState owned;
    owned.add_whole({"weight", DType::u8, {2'000'000}});
    owned.fill(7);
    Saver saver(nullptr, small_disk.path() + "/root", saver_options());
    saver.save(1, owned.state);
    owned.fill(8);
    const Error error = error_of([&] { saver.save(2, owned.state); });
    EXPECT_EQ(error.code(), Code::io);
    EXPECT_EQ(error.record()->native_code, ENOSPC) << error.what();
    owned.poison();
    EXPECT_EQ(saver.resume(owned.state), 1);
    EXPECT_EQ(owned.differences(7), 0);
    // The room of the failed save was given back.
    OwnedState small;
    small.add_whole({"weight", DType::u8, {500'000}});
    EXPECT_NO_THROW(saver.save(3, small.state));
}

}  // namespace
}  // namespace tsr::testing
