// The machine loses its power while a job saves, and anything that was not fsynced may be on the disk or not
// (memory_files.hpp says what that covers). Whatever is left, a checkpoint that save() had returned for loads bit for
// bit, and nothing loads that is not a whole save; the next job goes on from it and collects what was left.
//
// The job runs a few times, under different schedules of its ranks, also in the background and in PyTorch's format, and a snapshot of the disk is taken after each
// operation. A seed chooses a snapshot and what of it survives. TESSERA_FAULT_SEED=n runs that seed alone,
// `./dev fault --long` 100,000, the ordinary tests a sample of them.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "fault/job.hpp"
#include "sampling.hpp"

namespace tsr::testing {
namespace {

constexpr int keep = 2;
constexpr int64_t last_step = 4;

struct Snapshot {
    Disk disk;
    int64_t least = 0;  // the step whose save had returned: it has to be there, or one after it
    int64_t most = 0;   // the step that was being saved
};

// What was on the disk after each operation of a job that saves steps first..last.
std::vector<Snapshot> record(const Disk& disk, int ranks, uint64_t schedule, int64_t least, int64_t first, int64_t last,
                             Mode mode = Mode::sync, SaveFormat format = SaveFormat::native,
                             const Job::Judge& judge = {}) {
    std::vector<Snapshot> snapshots{{disk, least, first}};
    std::atomic<int64_t> returned{least};
    std::atomic<int64_t> saving{first};
    MemoryFiles files(disk);
    files.on_change = [&](const Disk& now) { snapshots.push_back({now, returned, saving}); };
    Job job(files, ranks, schedule, judge);
    expect_all_well(job.run([&](const Seat& seat) {
        OwnedState owned;
        build(owned, seat.rank, seat.ranks);
        SaverOptions options = job_options(seat.files, keep);
        options.format = format;
        Saver saver(seat.comm, root, options);
        for (int64_t step = first; step <= last; ++step) {
            if (seat.rank == 0) saving = step;
            save_step(saver, owned, seat.rank, step, mode);
            if (seat.rank == 0) returned = step;
        }
    }));
    files.on_change = nullptr;
    snapshots.push_back({files.disk(), last, last});
    return snapshots;
}

struct Tally {
    int64_t old_ones = 0;
    int64_t new_ones = 0;
    int64_t none = 0;
    int64_t twice = 0;
};

Disk after_power_loss(const Snapshot& snapshot, std::mt19937_64& random) {
    Disk disk = snapshot.disk;
    disk.lose_power(random);
    bury(disk, Afterwards::machine_was_restarted);
    disk.pass(lease_runs_out);
    return disk;
}

void check(const Snapshot& snapshot, std::mt19937_64& random, Tally& tally) {
    const Disk disk = after_power_loss(snapshot, random);
    MemoryFiles files(disk);
    const int64_t found = go_on(files, last_step + 1, keep);
    EXPECT_GE(found, snapshot.least);
    EXPECT_LE(found, snapshot.most);
    if (random() % 4 == 0) expect_collected(files, last_step + 2, keep);
    ++(found == 0 ? tally.none : found == snapshot.most ? tally.new_ones : tally.old_ones);

    // Now and then the power fails again while the next job saves.
    if (::testing::Test::HasFailure() || random() % 64 != 0) return;
    const std::vector<Snapshot> next = record(disk, 1, 0, found, last_step + 1, last_step + 1);
    for (int i = 0; i < 8; ++i) {
        MemoryFiles again(after_power_loss(next[random() % next.size()], random));
        const int64_t then = go_on(again, last_step + 2, keep);
        EXPECT_TRUE(then == found || then == last_step + 1) << then;
        expect_collected(again, last_step + 3, keep);
        ++tally.twice;
    }
}

TEST(PowerLoss, LeavesACheckpointThatWasSavedAndNoneThatIsNotWhole) {
    // Under a sanitizer each seed takes ten times as long.
    // One of 50 such samples, by the seed of the run.
    const uint64_t count = takes_all() ? 100'000 : sanitized ? 300 : 2000;
    const char* const only = std::getenv("TESSERA_FAULT_SEED");  // NOLINT(concurrency-mt-unsafe): nobody sets it
    std::vector<std::vector<Snapshot>> runs;
    size_t points = 0;
    for (const int ranks : {1, 3}) {
        for (uint64_t schedule = 0; schedule < (ranks > 1 ? 4 : 1); ++schedule) {
            runs.push_back(record(Disk{}, ranks, schedule, 0, 1, last_step));
            runs.push_back(record(disk_before(Before::saves, ranks), ranks, schedule, 2, 3, last_step));
        }
        for (const Mode mode : {Mode::sync, Mode::async}) {
            for (const SaveFormat format : {SaveFormat::native, SaveFormat::torch_dcp}) {
                if (mode == Mode::sync && format == SaveFormat::native) continue;  // those above
                runs.push_back(record(Disk{}, ranks, 1, 0, 1, last_step, mode, format));
                runs.push_back(record(disk_before(Before::saves, ranks), ranks, 2, 2, 3, last_step, mode, format));
            }
        }
    }
    for (const auto& run : runs) points += run.size();

    Tally tally;
    const uint64_t sample = takes_all() ? 0 : unsigned{Seed()} % 50;
    const uint64_t first = only != nullptr ? from_environment("TESSERA_FAULT_SEED", 0) : sample * count;
    const uint64_t end = only != nullptr ? first + 1 : first + count;
    for (uint64_t seed = first; seed < end; ++seed) {
        std::mt19937_64 random(seed);
        const std::vector<Snapshot>& run = runs[random() % runs.size()];
        const size_t point = random() % run.size();
        SCOPED_TRACE(
            fmt::format("TESSERA_FAULT_SEED={}: power lost after operation {} of {}", seed, point, run.size()));
        check(run[point], random, tally);
        if (HasFailure()) return;
    }
    fmt::print(
        "power loss: {} seeds over {} points; {} left the old checkpoint, {} the new one, {} none before the first"
        " was saved; {} lost power twice\n",
        end - first, points, tally.old_ones, tally.new_ones, tally.none, tally.twice);
    if (only == nullptr) {
        EXPECT_GT(tally.old_ones, 0);
        EXPECT_GT(tally.new_ones, 0);
        EXPECT_GT(tally.none, 0);
    }
}

// Whatever operation was the last, of the process or of the machine.
TEST(PowerLoss, LeavesAnExportThatIsWholeOrNone) {
    for (const ExportFormat format : export_formats) {
        for (const int ranks : {1, 3}) {
            const Disk before = disk_before(Before::saves, ranks);
            MemoryFiles sound(before);
            MemoryFiles files(before);
            std::vector<Disk> snapshots{before};
            files.on_change = [&](const Disk& now) { snapshots.push_back(now); };
            Job job(files, ranks, 0);
            expect_all_well(job.run([&](const Seat& seat) { export_newest(seat, sound, format); }));
            files.on_change = nullptr;
            int whole = 0;
            int none = 0;
            for (size_t point = 0; point < snapshots.size(); ++point) {
                for (uint64_t seed = 0; seed < (takes_all() ? 20 : 3); ++seed) {
                    SCOPED_TRACE(fmt::format("{} by {} ranks: operation {} of {}, seed {}", name_of(format), ranks,
                                             point, snapshots.size(), seed));
                    Disk disk = snapshots[point];
                    std::mt19937_64 random(seed);
                    if (seed > 0) disk.lose_power(random);
                    MemoryFiles left(disk);
                    const bool is_there = has_export(left);
                    ++(is_there ? whole : none);
                    EXPECT_TRUE(is_there || point + 1 < snapshots.size()) << "it was said to be there";
                    if (HasFailure()) return;
                }
            }
            EXPECT_GT(whole, 0);
            EXPECT_GT(none, 0);
            fmt::print("  export, {} by {} ranks: {} whole, {} none\n", name_of(format), ranks, whole, none);
        }
    }
}

// The model itself: what is not fsynced can be lost, what is fsynced cannot, and each alone.
TEST(PowerLoss, TakesAnythingThatWasNotSyncedAndNothingElse) {
    MemoryFiles files;
    const auto write = [&](const std::string& path, const std::string& text, bool sync) {
        const auto file = open_file(files, path, OpenMode::create);
        write_all(*file, path, std::as_bytes(std::span(text)), 0);
        if (sync) sync_file(*file, path);
    };
    write("/synced", std::string(3 * 4096, 's'), true);
    write("/unsynced", std::string(3 * 4096, 'u'), false);
    write("/old", "old", true);
    write("/new", "new", true);
    sync_directory(files, "/");
    write("/late", "late", true);
    ASSERT_EQ(files.rename("/new", "/old"), 0);
    std::set<std::string> renamed;
    std::set<std::string> unsynced;
    bool late_lost = false;
    bool late_kept = false;
    for (uint64_t seed = 0; seed < 300; ++seed) {
        std::mt19937_64 random(seed);
        Disk disk = files.disk();
        disk.lose_power(random);
        std::map<std::string, std::string> found;
        disk.for_each_file([&](const std::string& path, const std::string& text) { return found[path] = text; });
        ASSERT_EQ(found["/synced"], std::string(3 * 4096, 's'));
        const bool has_new = found.contains("/new");
        ASSERT_EQ(found["/old"], has_new ? "old" : "new") << "a rename happens whole or not at all";
        renamed.insert(found["/old"]);
        (found.contains("/late") ? late_kept : late_lost) = true;
        ASSERT_TRUE(!found.contains("/late") || found["/late"] == "late");
        const std::string& text = found["/unsynced"];
        unsynced.insert(text == std::string(3 * 4096, 'u') ? "whole" : text.empty() ? "empty" : "part");
    }
    EXPECT_EQ(renamed, (std::set<std::string>{"new", "old"}));
    EXPECT_EQ(unsynced, (std::set<std::string>{"empty", "part", "whole"}));
    EXPECT_TRUE(late_lost);
    EXPECT_TRUE(late_kept);
}

// The test above would see a saver that leaves out an fsync: each of these loses a checkpoint, or leaves a broken one.
TEST(PowerLoss, IsNotSurvivedWithoutEachFsync) {
    const std::vector<std::string> all{".safetensors",         "manifest.json.tmp", "directory /data/root/step",
                                       "directory /data/root", "directory /data",   "directory /"};
    for (const std::string& forgotten : all) {
        const auto judge = [&](Job&, int64_t, int, const FaultyFiles::Call& call) -> Verdict {
            const bool is_directory = call.name.starts_with("fsync directory ");
            const bool meant = !call.name.starts_with("fsync ") ? false
                               : !is_directory                  ? call.name.find(forgotten) != std::string::npos
                               : forgotten.ends_with("step")    ? call.name.starts_with("fsync " + forgotten)
                                                                : call.name == "fsync " + forgotten;
            return {0, SIZE_MAX, meant};
        };
        const std::vector<Snapshot> run = record(Disk{}, 1, 0, 0, 1, 2, Mode::sync, SaveFormat::native, judge);
        int64_t lost = 0;
        int64_t broken = 0;
        for (uint64_t seed = 0; seed < 1000; ++seed) {
            std::mt19937_64 random(seed);
            const Snapshot& snapshot = run[random() % run.size()];
            MemoryFiles files(after_power_loss(snapshot, random));
            const Found found = find_newest(files);
            if (!found.fault.empty()) {
                ++broken;
            } else if (found.step < snapshot.least) {
                ++lost;
            }
        }
        fmt::print("  without fsync of {}: of 1000 seeds {} lose the checkpoint, {} find a broken one\n", forgotten,
                   lost, broken);
        EXPECT_GT(lost + broken, 0) << forgotten;
    }
}

}  // namespace
}  // namespace tsr::testing
