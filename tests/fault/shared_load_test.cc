// A rank that is killed while the ranks of its host load together: the others fail at once and name it.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "checkpoint/fixture.hpp"
#include "fault/faulty_files.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

constexpr int ranks = 3;

void build(OwnedState& owned) { owned.add_whole({"weight", DType::f64, {3000, 1024}}); }  // 23 MiB

// What a rank's process ends with: 0 if its load said PEER_LOST and named rank 1 within the time that a death takes to be
// noticed.
int load(int rank, const std::string& rendezvous, const std::string& path) {
    FaultyFiles files(posix_file_system(), [rank](const FaultyFiles::Call& call) -> Verdict {
        if (rank == 1 && call.name.starts_with("read ") && call.bytes >= 65536) ::raise(SIGKILL);
        return {};
    });
    try {
        StoreOptions store;
        store.timeout = patience(milliseconds{30000});
        LoadOptions options;
        options.comm =
            Communicator::create(Store::open("file://" + rendezvous, store), rank, ranks, test_options("shm"));
        OwnedState owned;
        build(owned);
        (void)Checkpoint::open(path, files)->load(owned.state, options);
    } catch (const Error& error) {
        if (error.code() == Code::peer_lost && error.record()->peer == 1) return 0;
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        return 1;
    }
    return 2;
}

TEST(SharedLoad, ARankThatIsKilledInItFailsTheOthersAtOnce) {
    const TempDir dir;
    const TempDir rendezvous;
    {
        OwnedState owned;
        build(owned);
        owned.fill();
        Saver saver(nullptr, dir.path(), saver_options());
        saver.save(1, owned.state);
    }
    const std::string path = only_save(dir.path());
    const auto started = Clock::now();
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks; ++rank) {
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) ::_exit(load(rank, rendezvous.path(), path));
        children.push_back(child);
    }
    for (int rank = 0; rank < ranks; ++rank) {
        int status = 0;
        ASSERT_EQ(::waitpid(children[static_cast<size_t>(rank)], &status, 0), children[static_cast<size_t>(rank)]);
        if (rank == 1) {
            EXPECT_TRUE(WIFSIGNALED(status));
        } else {
            EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << ": " << status;
        }
    }
    EXPECT_LT(Clock::now() - started, patience(std::chrono::seconds(15)));  // not the communicator's 20
}

}  // namespace
}  // namespace tsr::testing
