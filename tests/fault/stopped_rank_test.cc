// A rank that stands still in the middle of a save or a load, as by SIGSTOP, a swapped host or a hung mount: at the
// deadline the others are told who, the former checkpoint stands, and when it goes on a new saver saves with all ranks.
#include <gtest/gtest.h>

#include <csignal>

#include "checkpoint/fixture.hpp"
#include "checkpoint/root/root.hpp"
#include "comm_processes/processes.hpp"
#include "fault/faulty_files.hpp"
#include "fault/job.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

constexpr int ranks = 3;
constexpr milliseconds deadline{sanitized ? 5000 : 700};

enum class Standing { in_a_save, in_a_save_in_the_background, in_a_load };

void build(OwnedState& owned) { owned.add_whole({"weight", DType::f64, {3000, 256}}); }  // 6 MiB

std::vector<int64_t> committed_steps(const std::string& root) {
    std::vector<int64_t> steps;
    for (const SavedStep& save : scan_root(posix_file_system(), root)) {
        if (save.committed) steps.push_back(save.step);
    }
    return steps;
}

// What a rank does; it fails by an exception.
void body(int rank, const std::shared_ptr<Store>& store, const Processes::Say& say, const std::string& root,
          Standing standing) {
    bool stood = false;
    FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
        const std::string_view what = standing == Standing::in_a_load ? "read " : "write ";
        if (rank == 1 && !stood && call.name.starts_with(what) && call.bytes >= 65536) {
            stood = true;
            ::raise(SIGSTOP);
        }
        Verdict verdict;
        verdict.left_out = call.name.starts_with("fsync ");  // a busy disk is not what is waited for
        return verdict;
    });
    const auto comm = Communicator::create(store, rank, ranks, test_options("shm"));
    SaverOptions options;
    options.timeout = deadline;
    options.files = &files;
    options.least_shared_bytes = 1;
    options.write.threads = 1;
    OwnedState owned;
    build(owned);
    owned.fill(1);
    auto saver = std::make_unique<Saver>(comm, root, options);
    const auto began = Clock::now();
    const Error error = error_of([&] {
        if (standing == Standing::in_a_load) {
            (void)saver->resume(owned.state);
        } else if (standing == Standing::in_a_save) {
            saver->save(2, owned.state);
        } else {
            (void)saver->save_async(2, owned.state);
            saver->wait();
        }
    });
    if (rank != 1) {
        EXPECT_EQ(error.code(), Code::timeout) << error.what();
        EXPECT_EQ(error.record()->peer, 1) << error.what();
        // A load waits for data, and then for the vote on what failed.
        EXPECT_LE(Clock::now() - began, 2 * deadline + patience(std::chrono::seconds(8)));
    }
    saver.reset();
    if (rank != 1) {
        EXPECT_EQ(committed_steps(root), std::vector<int64_t>{1});
        say("told");
    }
    comm->run({});
    options.timeout = patience(milliseconds{30000});
    saver = std::make_unique<Saver>(comm, root, options);
    saver->save(3, owned.state);
    EXPECT_EQ(committed_steps(root), (std::vector<int64_t>{1, 3}));
}

class StoppedRank : public ::testing::TestWithParam<Standing> {};

TEST_P(StoppedRank, IsNamedAtTheDeadlineAndSavesAgainWhenItGoesOn) {
    const TempDir dir;
    {
        OwnedState owned;
        build(owned);
        owned.fill(1);
        Saver(nullptr, dir.path(), saver_options()).save(1, owned.state);
    }
    Processes processes(
        ranks, [&](int rank, const auto& store, const auto& say) { body(rank, store, say, dir.path(), GetParam()); });
    int status = 0;
    ASSERT_EQ(::waitpid(processes.pid(1), &status, WUNTRACED), processes.pid(1));
    ASSERT_TRUE(WIFSTOPPED(status)) << status;
    for (const int rank : {0, 2}) processes.await(rank, "told");
    processes.signal(1, SIGCONT);
    processes.expect_all_well();
}

std::string name_of(const ::testing::TestParamInfo<Standing>& standing) {
    switch (standing.param) {
        case Standing::in_a_save: return "Save";
        case Standing::in_a_save_in_the_background: return "SaveInTheBackground";
        case Standing::in_a_load: return "Load";
    }
    return "";
}

INSTANTIATE_TEST_SUITE_P(InEach, StoppedRank,
                         ::testing::Values(Standing::in_a_save, Standing::in_a_save_in_the_background,
                                           Standing::in_a_load),
                         name_of);

}  // namespace
}  // namespace tsr::testing
