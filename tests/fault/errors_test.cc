// Every file operation of a save, a load, a resume and of the clearing up fails with every error that a file system may
// give, once or from there on, and is cut short or interrupted. Either the error is harmless by design, or every rank
// gets the same typed error at once; the former checkpoint stands, nothing leaks, and the same saver saves again when the
// file system is well again.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <dirent.h>

#include <cstdlib>
#include <thread>

#include "fault/job.hpp"
#include "patience.hpp"
#include "sampling.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

constexpr int keep = 2;
constexpr int64_t old_step = 2;  // of Before::saves
constexpr int64_t new_step = 3;
// Deadlines are 30 s; under a sanitizer on a busy machine all is slow.
milliseconds at_once() { return patience(milliseconds{20000}); }

enum class Kind { once, from_there_on, partly };

struct Failure {
    Kind kind;
    int error_number;
    [[nodiscard]] std::string str() const {
        if (kind == Kind::partly) return error_number == EINTR ? "interrupted, then short" : "short";
        return fmt::format("errno {} {}", error_number, kind == Kind::once ? "once" : "from there on");
    }
};

const std::vector<Failure>& all_failures() {
    static const std::vector<Failure> failures = [] {
        std::vector<Failure> list;
        for (const int error_number : {ENOSPC, EIO, EDQUOT, EINTR, EROFS, ENOENT}) {
            list.push_back({Kind::once, error_number});
        }
        for (const int error_number : {ENOSPC, EIO, EDQUOT, EROFS}) list.push_back({Kind::from_there_on, error_number});
        list.push_back({Kind::partly, 0});
        list.push_back({Kind::partly, EINTR});
        return list;
    }();
    return failures;
}

// Each operation meets one of the failures, which come round from one to the next; all of them with --long.
bool has_turn(int64_t at, size_t failure) {
    static const Seed seed;
    const size_t count = all_failures().size();
    return takes_all() || (failure + static_cast<size_t>(at) + seed) % count == 0;
}

bool changes_something(const std::string& call) {
    for (const char* begin : {"create", "mkdir", "rename", "link", "write", "fallocate", "ftruncate", "fsync"}) {
        if (call.starts_with(begin)) return true;
    }
    return call.starts_with("unlink") || call.starts_with("rmdir");
}

// Fails operation `at`, and after it what a file system in that state fails.
class Plan {
   public:
    Plan(int64_t at, Failure failure) : at_(at), failure_(failure) {}
    Verdict operator()(int64_t number, const FaultyFiles::Call& call) {
        if (repaired_ || number < at_) return {};
        if (number == at_) failed_call_ = call.name;
        switch (failure_.kind) {
            case Kind::once:
                if (number != at_) return {};
                return {-failure_.error_number, call.bytes / 2};
            case Kind::from_there_on:
                // A disk that is full or read-only can be read; one that is broken cannot.
                if (failure_.error_number != EIO && !changes_something(call.name)) return {};
                if ((failure_.error_number == ENOSPC || failure_.error_number == EDQUOT) &&
                    (call.name.starts_with("unlink") || call.name.starts_with("rmdir"))) {
                    return {};
                }
                return {-failure_.error_number, call.bytes / 2};
            case Kind::partly:
                if (call.bytes == 0 || number > at_ + 1) return {};
                if (failure_.error_number == EINTR && number == at_) return {-EINTR, 0};
                return {0, call.bytes / 3 + 1};
        }
        return {};
    }
    void repair() { repaired_ = true; }
    [[nodiscard]] const std::string& failed_call() const { return failed_call_; }

   private:
    int64_t at_;
    Failure failure_;
    std::atomic<bool> repaired_{false};
    std::string failed_call_;  // ranks take turns: no two are here at once
};

int threads_of_this_process() {
    std::thread([] {}).join();  // with the first one ThreadSanitizer starts one of its own
    int count = 0;
    DIR* const tasks = ::opendir("/proc/self/task");
    while (const dirent* entry = ::readdir(tasks)) count += entry->d_name[0] != '.' ? 1 : 0;
    ::closedir(tasks);
    return count;
}

// A thread that was joined may still be in the list for a moment.
void expect_threads(int count) {
    EXPECT_NO_THROW(wait_until([&] { return threads_of_this_process() <= count; }, soon(), "threads are left"));
}

struct Tally {
    int64_t points = 0;
    int64_t harmless = 0;
    int64_t refused = 0;
    std::set<std::string> codes;
    void count(const Outcomes& outcomes) {
        ++points;
        ++(outcomes[0] ? refused : harmless);
        if (outcomes[0]) codes.insert(std::string(code_name(outcomes[0]->code())));
    }
    [[nodiscard]] std::string str() const {
        return fmt::format("{} points; {} harmless, {} refused with {}", points, harmless, refused,
                           fmt::join(codes, ", "));
    }
};

// The same typed error on every rank, or none on any.
void expect_one_answer(const Outcomes& outcomes) {
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
        ASSERT_EQ(outcomes[rank].has_value(), outcomes[0].has_value()) << "rank " << rank;
        if (!outcomes[rank]) continue;
        EXPECT_EQ(outcomes[rank]->code(), outcomes[0]->code());
        EXPECT_STREQ(outcomes[rank]->what(), outcomes[0]->what());
        const Code code = outcomes[rank]->code();
        EXPECT_TRUE(code == Code::io || code == Code::not_found || code == Code::corrupt || code == Code::invalid_state)
            << code_name(code) << ": " << outcomes[rank]->what();
    }
}

SaverOptions options_of(const SaveCase& one, FileSystem& files) {
    SaverOptions options = job_options(files, keep);
    options.format = one.format;
    return options;
}

void save_and_go_on(const Seat& seat, const SaveCase& one, std::optional<Error>& outcome,
                    const std::function<void()>& when_all_are_back) {
    OwnedState owned;
    build(owned, seat.rank, seat.ranks);
    std::unique_ptr<Saver> saver;
    try {
        saver = std::make_unique<Saver>(seat.comm, root, options_of(one, seat.files));
        save_step(*saver, owned, seat.rank, new_step, one.mode);
    } catch (...) {
        outcome = current_error();
    }
    Peers peers(seat.comm);
    (void)peers.vote(std::nullopt);
    if (seat.rank == 0) when_all_are_back();
    (void)peers.vote(std::nullopt);
    if (!saver) saver = std::make_unique<Saver>(seat.comm, root, options_of(one, seat.files));
    save_step(*saver, owned, seat.rank, new_step + 1, one.mode);
    EXPECT_EQ(saver->resume(owned.state), new_step + 1);
    EXPECT_TRUE(has_content(owned, seat.rank, new_step + 1));
}

// Saves new_step, while operation `at` fails; then, with the file system well again, the next one by the same saver.
void save_with_failure(const SaveCase& one, const Disk& disk, int64_t at, const Failure& failure, Tally& tally) {
    MemoryFiles files(disk);
    Plan plan(at, failure);
    Outcomes saved(static_cast<size_t>(one.ranks));
    Found between;
    Job job(files, one.ranks, 0,
            [&](Job&, int64_t number, int, const FaultyFiles::Call& call) { return plan(number, call); });
    const auto began = Clock::now();
    const Outcomes all = job.run([&](const Seat& seat) {
        save_and_go_on(seat, one, saved[static_cast<size_t>(seat.rank)], [&] {
            plan.repair();
            between = find_newest(files);
        });
    });
    EXPECT_LT(Clock::now() - began, at_once());
    SCOPED_TRACE(fmt::format("{}: operation {} ({}) fails, {}{}", one.str(), at, plan.failed_call(), failure.str(),
                             saved[0] ? fmt::format("; it is told: {}", saved[0]->what()) : ""));
    expect_one_answer(saved);
    EXPECT_EQ(between.fault, "");
    if (!saved[0]) {
        EXPECT_EQ(between.step, new_step) << "it said that it saved";
    } else if (failure.kind != Kind::from_there_on) {
        EXPECT_EQ(between.step, one.old_step());
    } else {
        // What had just been committed could not be taken back.
        EXPECT_TRUE(between.step == one.old_step() || between.step == new_step) << between.step;
    }
    for (const auto& outcome : all) EXPECT_FALSE(outcome) << "the next save: " << outcome->what();
    EXPECT_EQ(files.open_files(), 0);
    tally.count(saved);
    // Whoever is told that a file is not there, when it is, cannot know that it is left.
    if (failure.error_number == ENOENT && plan.failed_call().starts_with("unlink")) return;
    if (tally.points % 4 != 0) return;  // it is the longer half of the work
    Disk later = files.disk();
    later.pass(lease_runs_out);
    MemoryFiles collected(later);
    expect_collected(collected, new_step + 2, keep);
}

int64_t operations_of(const Disk& disk, int ranks, const std::function<void(const Seat&)>& body) {
    MemoryFiles files(disk);
    Job job(files, ranks, 0);
    expect_all_well(job.run(body));
    return job.calls();
}

class ErrorsOfASave : public ::testing::TestWithParam<SaveCase> {};

std::vector<SaveCase> save_cases_in_both_formats() {
    std::vector<SaveCase> cases = save_cases_in(SaveFormat::native);
    for (const SaveCase& one : save_cases_in(SaveFormat::torch_dcp)) cases.push_back(one);
    return cases;
}

INSTANTIATE_TEST_SUITE_P(All, ErrorsOfASave, ::testing::ValuesIn(save_cases_in_both_formats()), [](const auto& one) {
    return fmt::format("{}_{}ranks_{}_{}", one.param.format == SaveFormat::native ? "native" : "torch_dcp",
                       one.param.ranks, one.param.mode == Mode::sync ? "sync" : "async",
                       one.param.before == Before::saves ? "later" : "first");
});

TEST_P(ErrorsOfASave, AreToldToAllRanksAndTheFormerCheckpointStands) {
    const SaveCase& one = GetParam();
    const int threads = threads_of_this_process();
    const Disk disk = disk_before(one.before, one.ranks);
    const int64_t count = operations_of(disk, one.ranks, [&](const Seat& seat) {
        OwnedState owned;
        build(owned, seat.rank, seat.ranks);
        Saver saver(seat.comm, root, options_of(one, seat.files));
        save_step(saver, owned, seat.rank, new_step, one.mode);
    });
    Tally tally;
    for (int64_t at = 0; at < count; ++at) {
        for (size_t i = 0; i < all_failures().size(); ++i) {
            if (!has_turn(at, i)) continue;
            save_with_failure(one, disk, at, all_failures()[i], tally);
            if (HasFailure()) return;
        }
    }
    EXPECT_GT(tally.refused, 0);
    EXPECT_GT(tally.harmless, 0);
    fmt::print("save, {}: {}\n", one.str(), tally.str());
    expect_threads(threads);
}

TEST(Errors, AtAnyOperationOfAResumeAreToldToAllRanks) {
    const int threads = threads_of_this_process();
    int64_t points = 0;
    for (const int ranks : {1, 3}) {
        const Disk disk = disk_before(Before::saves, ranks);
        const auto resume = [](const Seat& seat) {
            OwnedState owned;
            build(owned, seat.rank, seat.ranks);
            set_content(owned, seat.rank, 99);
            owned.poison();
            Saver saver(seat.comm, root, job_options(seat.files, keep));
            EXPECT_EQ(saver.resume(owned.state), old_step);
            EXPECT_TRUE(has_content(owned, seat.rank, old_step));
        };
        const int64_t count = operations_of(disk, ranks, resume);
        Tally tally;
        for (int64_t at = 0; at < count; ++at) {
            for (size_t i = 0; i < all_failures().size(); ++i) {
                if (!has_turn(at, i)) continue;
                const Failure& failure = all_failures()[i];
                MemoryFiles files(disk);
                Plan plan(at, failure);
                Job job(files, ranks, 0,
                        [&](Job&, int64_t number, int, const FaultyFiles::Call& call) { return plan(number, call); });
                const auto began = Clock::now();
                const Outcomes outcomes = job.run(resume);
                EXPECT_LT(Clock::now() - began, at_once());
                SCOPED_TRACE(
                    fmt::format("{} ranks: operation {} ({}) fails, {}", ranks, at, plan.failed_call(), failure.str()));
                expect_one_answer(outcomes);
                EXPECT_EQ(files.open_files(), 0);
                tally.count(outcomes);
                if (HasFailure()) return;
            }
        }
        EXPECT_GT(tally.refused, 0);
        fmt::print("  resume, {} ranks: {}\n", ranks, tally.str());
        points += tally.points;
    }
    expect_threads(threads);
    fmt::print("errors in a resume: {} points\n", points);
}

TEST(Errors, AtAnyOperationOfAnExportAreToldToAllRanksAndNothingIsLeft) {
    const int threads = threads_of_this_process();
    int64_t points = 0;
    for (const ExportFormat format : export_formats) {
        for (const int ranks : {1, 3}) {
            const Disk disk = disk_before(Before::saves, ranks);
            MemoryFiles sound(disk);
            const auto body = [&](const Seat& seat) { export_newest(seat, sound, format); };
            const int64_t count = operations_of(disk, ranks, body);
            Tally tally;
            for (int64_t at = 0; at < count; ++at) {
                for (size_t i = 0; i < all_failures().size(); ++i) {
                    if (!has_turn(at, i)) continue;
                    const Failure& failure = all_failures()[i];
                    MemoryFiles files(disk);
                    Plan plan(at, failure);
                    Job job(files, ranks, 0, [&](Job&, int64_t number, int, const FaultyFiles::Call& call) {
                        return plan(number, call);
                    });
                    const Outcomes outcomes = job.run(body);
                    SCOPED_TRACE(fmt::format("{} by {} ranks: operation {} ({}) fails, {}; {}", name_of(format), ranks,
                                             at, plan.failed_call(), failure.str(),
                                             outcomes[0] ? outcomes[0]->what() : "no error"));
                    expect_one_answer(outcomes);
                    // What had its name already stays when that cannot be made durable.
                    const bool is_there = has_export(files);
                    EXPECT_TRUE(is_there || outcomes[0]);
                    EXPECT_TRUE(!is_there || !outcomes[0] || plan.failed_call() == "fsync directory /data");
                    std::vector<std::string> names;
                    EXPECT_EQ(files.list("/data", names), 0);
                    if (failure.kind == Kind::once) {  // a file system that stays broken lets nobody clear up
                        EXPECT_EQ(names.size(), is_there ? 2u : 1u) << fmt::format("{}", fmt::join(names, " "));
                    }
                    EXPECT_EQ(files.open_files(), 0);
                    tally.count(outcomes);
                    if (HasFailure()) return;
                }
            }
            EXPECT_GT(tally.refused, 0);
            EXPECT_GT(tally.harmless, 0);
            fmt::print("  export, {} by {} ranks: {}\n", name_of(format), ranks, tally.str());
            points += tally.points;
        }
    }
    expect_threads(threads);
    fmt::print("errors in an export: {} points\n", points);
}

TEST(Errors, AtAnyOperationOfALoadOrAVerifyAreToldOrHarmless) {
    const int threads = threads_of_this_process();
    int64_t points = 0;
    const Disk disk = disk_before(Before::saves, 3);
    const auto load = [](const Seat& seat) {
        OwnedState owned;
        build(owned, 0, 1);
        set_content(owned, 0, 99);
        owned.poison();
        const auto checkpoint = Checkpoint::open(root, seat.files);
        (void)checkpoint->load(owned.state);
        EXPECT_EQ(checkpoint->manifest().step, old_step);
        EXPECT_TRUE(has_content(owned, 0, old_step));
    };
    const auto verify = [](const Seat& seat) {
        Checkpoint::open(root, seat.files)->check(Checkpoint::Depth::everything);
    };
    const std::vector<std::pair<std::string, std::function<void(const Seat&)>>> bodies{{"load", load},
                                                                                       {"verify", verify}};
    for (const auto& [name, body] : bodies) {
        const int64_t count = operations_of(disk, 1, body);
        Tally tally;
        for (int64_t at = 0; at < count; ++at) {
            for (size_t i = 0; i < all_failures().size(); ++i) {
                if (!has_turn(at, i)) continue;
                const Failure& failure = all_failures()[i];
                MemoryFiles files(disk);
                Plan plan(at, failure);
                Job job(files, 1, 0,
                        [&](Job&, int64_t number, int, const FaultyFiles::Call& call) { return plan(number, call); });
                const Outcomes outcomes = job.run(body);
                SCOPED_TRACE(
                    fmt::format("{}: operation {} ({}) fails, {}", name, at, plan.failed_call(), failure.str()));
                expect_one_answer(outcomes);
                EXPECT_EQ(files.open_files(), 0);
                tally.count(outcomes);
                if (HasFailure()) return;
            }
        }
        EXPECT_GT(tally.refused, 0);
        fmt::print("  {}: {}\n", name, tally.str());
        points += tally.points;
    }
    expect_threads(threads);
    fmt::print("errors in a load: {} points\n", points);
}

}  // namespace
}  // namespace tsr::testing
