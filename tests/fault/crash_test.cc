// A job that dies at any file operation of a save leaves the old or the new checkpoint: bit for bit, never neither, never
// a mix; the next job goes on from it and collects what was left. The enumeration is complete: a first run counts the
// operations, then the job dies before each of them, and in the middle of each write. "Dies" is meant: from there on no
// rank that is dead reads, writes or answers. Power loss is in power_loss_test.cc.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "fault/job.hpp"
#include "patience.hpp"
#include "sampling.hpp"

namespace tsr::testing {
namespace {

constexpr int keep = 2;

constexpr int64_t new_step = 3;

void save_once(const Seat& seat, const SaveCase& one) {
    OwnedState owned;
    build(owned, seat.rank, seat.ranks);
    SaverOptions options = job_options(seat.files, keep);
    options.format = one.format;
    Saver saver(seat.comm, root, options);
    save_step(saver, owned, seat.rank, new_step, one.mode);
}

struct Operation {
    int rank;
    FaultyFiles::Call call;
};

std::vector<Operation> operations_of(const SaveCase& one, const Disk& disk, uint64_t schedule) {
    std::vector<Operation> operations;
    MemoryFiles files(disk);
    Job job(files, one.ranks, schedule, [&](Job&, int64_t, int rank, const FaultyFiles::Call& call) -> Verdict {
        operations.push_back({rank, call});
        return {};
    });
    expect_all_well(job.run([&](const Seat& seat) { save_once(seat, one); }));
    EXPECT_EQ(newest_content(files), new_step);
    EXPECT_EQ(leftovers(files), std::set<std::string>{});
    return operations;
}

// Kills `victim` (-1: all ranks) at call `at`; a write moves `bytes` first.
Outcomes die(MemoryFiles& files, const SaveCase& one, uint64_t schedule, int64_t at, int victim, size_t bytes) {
    Job job(files, one.ranks, schedule, [&](Job& self, int64_t number, int, const FaultyFiles::Call&) -> Verdict {
        if (number != at) return {};
        self.kill(victim);
        return {-EIO, bytes};
    });
    return job.run([&](const Seat& seat) { save_once(seat, one); });
}

struct Tally {
    int64_t points = 0;
    int64_t old_ones = 0;
    int64_t new_ones = 0;
};

void expect_old_or_new(const Disk& after, const SaveCase& one, Tally& tally) {
    Disk disk = after;
    bury(disk, Afterwards::process_is_gone);
    MemoryFiles files(disk);
    const int64_t content = go_on(files, 4, keep);
    EXPECT_TRUE(content == one.old_step() || content == new_step) << content;
    Disk later = files.disk();
    later.pass(lease_runs_out);
    MemoryFiles collected(later);
    expect_collected(collected, 5, keep);
    ++tally.points;
    ++(content == new_step ? tally.new_ones : tally.old_ones);
}

void print(const std::string& what, const Tally& tally) {
    fmt::print("  {}: {} points; {} left the old checkpoint, {} the new one\n", what, tally.points, tally.old_ones,
               tally.new_ones);
}

// In the native format and in PyTorch's.
class CrashIn : public ::testing::TestWithParam<SaveFormat> {};

INSTANTIATE_TEST_SUITE_P(Formats, CrashIn, ::testing::Values(SaveFormat::native, SaveFormat::torch_dcp),
                         [](const auto& one) { return one.param == SaveFormat::native ? "native" : "torch_dcp"; });

TEST_P(CrashIn, AllRanksAtAnyOperationLeavesTheOldOrTheNewCheckpoint) {
    int64_t points = 0;
    for (const SaveCase& one : save_cases_in(GetParam())) {
        const Disk disk = disk_before(one.before, one.ranks);
        Tally tally;
        // Of several ranks, other schedules meet other states of the others.
        const uint64_t schedules = one.ranks > 1 && !sanitized ? 3 : 1;
        const Sample sample(sanitized ? 3 : 5);
        for (uint64_t schedule = 0; schedule < schedules; ++schedule) {
            const std::vector<Operation> operations = operations_of(one, disk, schedule);
            for (size_t at = 0; at < operations.size(); ++at) {
                if (!sample.takes(at + schedule, operations.size() + schedule)) continue;
                const FaultyFiles::Call& call = operations[at].call;
                std::vector<size_t> parts{0};
                if (call.name.starts_with("write")) parts = {0, call.bytes / 2};
                for (const size_t bytes : parts) {
                    SCOPED_TRACE(fmt::format("{}, schedule {}: all die at operation {} ({}) after {} bytes", one.str(),
                                             schedule, at, call.name, bytes));
                    MemoryFiles files(disk);
                    (void)die(files, one, schedule, static_cast<int64_t>(at), -1, bytes);
                    EXPECT_EQ(files.open_files(), 0);
                    expect_old_or_new(files.disk(), one, tally);
                    if (HasFailure()) return;
                }
            }
        }
        EXPECT_GT(tally.old_ones, 0);
        EXPECT_GT(tally.new_ones, 0);
        print("all ranks die, " + one.str(), tally);
        points += tally.points;
    }
    fmt::print("crash of the job: {} points\n", points);
}

TEST_P(CrashIn, OneRankIsToldToTheOthersAndLeavesTheOldOrTheNewCheckpoint) {
    int64_t points = 0;
    for (const SaveCase& one : save_cases_in(GetParam())) {
        if (one.ranks == 1) continue;
        const Disk disk = disk_before(one.before, one.ranks);
        const std::vector<Operation> operations = operations_of(one, disk, 0);
        const Sample sample(sanitized ? 3 : 4);
        Tally tally;
        for (size_t at = 0; at < operations.size(); ++at) {
            if (!sample.takes(at, operations.size())) continue;
            const auto& [victim, call] = operations[at];
            SCOPED_TRACE(fmt::format("{}: rank {} dies at operation {} ({})", one.str(), victim, at, call.name));
            MemoryFiles files(disk);
            const auto began = Clock::now();
            const Outcomes outcomes = die(files, one, 0, static_cast<int64_t>(at), victim, 0);
            EXPECT_LT(Clock::now() - began, patience(std::chrono::seconds(20))) << "the deadline is 30 s";
            EXPECT_EQ(files.open_files(), 0);
            const int64_t content = newest_content(files);
            for (int rank = 0; rank < one.ranks; ++rank) {
                const auto& outcome = outcomes[static_cast<size_t>(rank)];
                if (rank == victim) continue;
                if (!outcome) {
                    EXPECT_EQ(content, new_step) << "rank " << rank << " was told that it is committed";
                } else if (outcome->code() == Code::peer_lost) {
                    EXPECT_EQ(content, one.old_step()) << outcome->what();
                    EXPECT_EQ(outcome->record()->peer, victim);
                } else {
                    EXPECT_EQ(outcome->code(), Code::commit_unknown) << outcome->what();
                }
            }
            expect_old_or_new(files.disk(), one, tally);
            if (HasFailure()) return;
        }
        EXPECT_GT(tally.old_ones, 0);
        EXPECT_GT(tally.new_ones, 0);
        print("one rank dies, " + one.str(), tally);
        points += tally.points;
    }
    fmt::print("death of one rank: {} points\n", points);
}

TEST(Crash, OfOneRankOfAnExportIsToldToTheOthersAndLeavesNoHalf) {
    constexpr int ranks = 3;
    const Disk disk = disk_before(Before::saves, ranks);
    MemoryFiles sound(disk);
    for (const ExportFormat format : export_formats) {
        const auto body = [&](const Seat& seat) { export_newest(seat, sound, format); };
        std::vector<Operation> operations;
        MemoryFiles first(disk);
        Job counted(first, ranks, 0, [&](Job&, int64_t, int rank, const FaultyFiles::Call& call) -> Verdict {
            operations.push_back({rank, call});
            return {};
        });
        expect_all_well(counted.run(body));
        EXPECT_TRUE(has_export(first));
        for (size_t at = 0; at < operations.size(); ++at) {
            const auto& [victim, call] = operations[at];
            SCOPED_TRACE(fmt::format("{}: rank {} dies at operation {} ({})", name_of(format), victim, at, call.name));
            MemoryFiles files(disk);
            Job job(files, ranks, 0, [&](Job& self, int64_t number, int rank, const FaultyFiles::Call&) -> Verdict {
                if (number != static_cast<int64_t>(at)) return {};
                self.kill(rank);
                return {-EIO, 0};
            });
            const Outcomes outcomes = job.run(body);
            for (int rank = 0; rank < ranks; ++rank) {
                if (rank == victim) continue;
                const auto& outcome = outcomes[static_cast<size_t>(rank)];
                ASSERT_TRUE(outcome) << "rank " << rank;
                EXPECT_EQ(outcome->code(), Code::peer_lost) << outcome->what();
                EXPECT_EQ(outcome->record()->peer, victim);
            }
            // Rank 0 clears up, if it lives. Its own death after the renaming leaves the whole.
            const bool is_there = has_export(files);
            EXPECT_EQ(is_there, call.name == "fsync directory /data" && at + 1 == operations.size());
            std::vector<std::string> names;
            EXPECT_EQ(files.list("/data", names), 0);
            EXPECT_TRUE(victim == 0 || names.size() == 1) << fmt::format("{}", fmt::join(names, " "));
            EXPECT_EQ(files.open_files(), 0);
            if (HasFailure()) return;
        }
    }
}

// A job that dies while it clears up after one that died.
TEST(Crash, OfTheNextJobTooLeavesTheOldOrTheNewCheckpoint) {
    const SaveCase one{1, Mode::sync, Before::saves};
    const Disk disk = disk_before(one.before, one.ranks);
    const size_t count = operations_of(one, disk, 0).size();
    Tally tally;
    const Sample firsts(sanitized ? 5 : 3);
    const Sample seconds(sanitized ? 14 : 4);
    for (size_t first = 0; first < count; ++first) {
        if (!firsts.takes(first, count)) continue;
        MemoryFiles files(disk);
        (void)die(files, one, 0, static_cast<int64_t>(first), -1, 0);
        Disk left = files.disk();
        bury(left, Afterwards::process_is_gone);
        left.pass(lease_runs_out);
        if (newest_content(files) == new_step) continue;
        const size_t second_count = operations_of(one, left, 0).size();
        for (size_t second = 0; second < second_count; ++second) {
            if (!seconds.takes(first + second, first + second_count)) continue;
            SCOPED_TRACE(fmt::format("dies at operation {}, the next job at operation {}", first, second));
            MemoryFiles again(left);
            (void)die(again, one, 0, static_cast<int64_t>(second), -1, 0);
            expect_old_or_new(again.disk(), one, tally);
            if (HasFailure()) return;
        }
    }
    print("two jobs die in turn", tally);
}

}  // namespace
}  // namespace tsr::testing
