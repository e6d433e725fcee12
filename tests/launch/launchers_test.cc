// Ranks under `tessera run` and under another launcher make a communicator from their environment. The rank is this very
// test program: it is started again with one of the tests of AsARank, under the launcher.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/proc.hpp"
#include "launch/environment.hpp"
#include "launch/from_environment.hpp"
#include "patience.hpp"
#include "places.hpp"
#include "processes.hpp"
#include "soon.hpp"
#include "store/token.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// Sums 1 + rank over all ranks. The tests below start it as the ranks of a job, which leave their results in $D; by itself
// it is the job of one rank.
TEST(AsARank, SumsOverTheRanks) {
    CommOptions options = CommOptions::from_environment();
    options.timeout = testing::patience(milliseconds{30000});
    for (int round = 0; round < 2; ++round) {  // the second communicator meets at the same store
        const auto comm = communicator_from_environment(options);
        float value = 1.0F + static_cast<float>(comm->rank());
        Tensor tensor;
        tensor.data = reinterpret_cast<std::byte*>(&value);
        tensor.dtype = DType::f32;
        const int64_t one = 1;
        tensor.shape = Dims(std::span<const int64_t>(&one, 1));
        Request request;
        request.collective = Collective::all_reduce;
        request.outputs = {&tensor, 1};
        request.op = ReduceOp::sum;
        comm->run(request);
        const int n = comm->world_size();
        EXPECT_EQ(value, static_cast<float>(n * (n + 1)) / 2);
        const char* directory = std::getenv("D");
        if (directory != nullptr) {
            std::ofstream(fmt::format("{}/{}.{}", directory, comm->rank(), round))
                << name_of(JobEnvironment::detect().launcher) << " " << n << " " << value << " " << comm->transport();
        }
        comm->finalize();
    }
}

// Is the same rank of three jobs in turn, which meet at the ports $PORTS, as the workers of Ray and Spark are. It leaves the
// first one before it joins the second, and that one after it has joined the third.
TEST(AsARank, BelongsToOneJobAfterAnother) {
    const char* ports = std::getenv("PORTS");
    if (ports == nullptr) return;
    std::istringstream list(ports);
    const auto join = [&list] {
        std::string port;
        list >> port;
        ::setenv("MASTER_PORT", port.c_str(), 1);
        CommOptions options = CommOptions::from_environment();
        options.timeout = milliseconds{30000};
        auto comm = communicator_from_environment(options);
        comm->run({});
        return comm;
    };
    join()->finalize();
    const auto second = join();
    const auto third = join();
    second->finalize();
    third->finalize();
}

// Rank 1 ends well, it believes, while the others still need it. By itself it is the job of one rank, which needs nobody.
TEST(AsARank, LeavesItsPeers) {
    CommOptions options = CommOptions::from_environment();
    options.timeout = testing::patience(milliseconds{30000});
    const auto comm = communicator_from_environment(options);
    try {
        comm->run({});
        if (comm->rank() == 1) std::_Exit(0);
        comm->run({});  // one that is slow may hear of it in the one before, too
    } catch (const Error& error) {
        std::fprintf(stderr, "tessera: %s\n", error.what());
        std::_Exit(1);
    }
}

// Rank 1 ends well, slowly: it is exiting already when its peers learn of it, and still when the agent ends the ranks.
TEST(AsARank, TakesItsTimeToLeave) {
    CommOptions options = CommOptions::from_environment();
    options.timeout = testing::patience(milliseconds{30000});
    auto comm = communicator_from_environment(options);
    if (comm->rank() == 1) {
        sigset_t told_to_end;
        sigemptyset(&told_to_end);
        sigaddset(&told_to_end, SIGTERM);
        ::pthread_sigmask(SIG_BLOCK, &told_to_end, nullptr);
        std::thread([comm = std::exchange(comm, nullptr), told_to_end]() mutable {
            comm->run({});
            wait_until([] { return process_stat(::getpid())->ending; }, testing::soon(), "the end of the main thread");
            comm = nullptr;
            const timespec limit{testing::patience(std::chrono::seconds(20)) / std::chrono::seconds(1), 0};
            std::_Exit(::sigtimedwait(&told_to_end, nullptr, &limit) == SIGTERM ? 0 : 2);
        }).detach();
        ::syscall(SYS_exit, 0);  // this thread alone
    }
    try {
        comm->run({});
        if (comm->world_size() > 1) comm->run({});
    } catch (const Error& error) {
        std::fprintf(stderr, "tessera: %s\n", error.what());
        std::_Exit(1);
    }
}

// The rank that $ABSENT names ends well without having joined.
TEST(AsARank, JoinsUnlessAbsent) {
    const char* absent = std::getenv("ABSENT");
    const char* rank = std::getenv("RANK");
    if (absent != nullptr && rank != nullptr && std::string_view(absent) == rank) std::_Exit(0);
    try {
        CommOptions options = CommOptions::from_environment();
        options.timeout = testing::patience(milliseconds{100000});
        communicator_from_environment(options)->finalize();
    } catch (const Error& error) {
        std::fprintf(stderr, "tessera: %s\n", error.what());
        std::_Exit(error.code() == Code::peer_lost ? 3 : 4);
    }
}

class Launchers : public ::testing::Test {
   protected:
    [[nodiscard]] static std::string self() {
        char path[PATH_MAX] = {};
        EXPECT_GT(::readlink("/proc/self/exe", path, sizeof path - 1), 0);
        return path;
    }
    [[nodiscard]] static std::string rank_command(const std::string& does = "Sums") {
        return self() + " --gtest_filter=AsARank." + does + "*";
    }
    [[nodiscard]] std::string log() const { return testing::read_file(directory_.path() / "log"); }
    void start(const std::string& launcher) const {
        const testing::Environment environment(
            {{"D", directory_.path().string()}, {"XDG_RUNTIME_DIR", directory_.path().string()}});
        ::chmod(directory_.path().c_str(), 0700);
        const int status = std::system(
            fmt::format("{} {} > {}/log 2>&1 < /dev/null", launcher, rank_command(), directory_.path().string())
                .c_str());
        ASSERT_EQ(status, 0) << log();
    }
    // As another launcher would, which needs not be installed: a process a rank, with the variables that it sets.
    void start_by_hand(int world_size, const std::function<std::map<std::string, std::string>(int rank)>& variables_of,
                       const std::string& does = "Sums") const {
        const std::string token = (directory_.path() / "token").string();
        std::ofstream(token) << Token::random().hex() << "\n";
        ::chmod(token.c_str(), 0600);
        std::vector<testing::Child> ranks;
        for (int rank = 0; rank < world_size; ++rank) {
            auto variables = variables_of(rank);
            variables["D"] = directory_.path().string();
            variables["TESSERA_TOKEN_FILE"] = token;
            variables["XDG_RUNTIME_DIR"] = "/proc";  // no place for a token: the file's counts
            ranks.push_back(testing::in_child(variables, [&] {
                const std::string command =
                    fmt::format("exec {} >> {}/log 2>&1 < /dev/null", rank_command(does), directory_.path().string());
                ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
            }));
        }
        for (testing::Child& rank : ranks) EXPECT_EQ(rank.wait(), 0) << log();
    }
    void expect_sums(const std::string& launcher, int world_size, const char* transport = "shm") const {
        for (int rank = 0; rank < world_size; ++rank) {
            for (int round = 0; round < 2; ++round) {
                std::ifstream file(directory_.path() / fmt::format("{}.{}", rank, round));
                std::string line;
                std::getline(file, line);
                EXPECT_EQ(line, fmt::format("{} {} {} {}", launcher, world_size, world_size * (world_size + 1) / 2,
                                            transport));
            }
        }
    }
    testing::TemporaryDirectory directory_;
};

TEST_F(Launchers, TesseraRun) {
    start(tsr::testing::binary_dir() + "/tessera run -n 3");
    expect_sums("tessera run", 3);
}

TEST_F(Launchers, TesseraRunInsecure) {
    start(tsr::testing::binary_dir() + "/tessera run --insecure -n 2");
    expect_sums("tessera run", 2);
}

TEST_F(Launchers, TesseraRunEncrypted) {
    start(tsr::testing::binary_dir() + "/tessera run --encrypt -n 2");
    expect_sums("tessera run", 2);
}

// Rank 0 serves the store until its process exits.
TEST_F(Launchers, VariablesEncrypted) {
    const std::string port = std::to_string(testing::free_port());
    start_by_hand(2, [&](int rank) -> std::map<std::string, std::string> {
        return {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"},   {"LOCAL_RANK", std::to_string(rank)},
                {"LOCAL_WORLD_SIZE", "2"},      {"MASTER_PORT", port}, {"TESSERA_TLS", "1"}};
    });
    expect_sums("torchrun", 2);
}

TEST_F(Launchers, TesseraRunThroughAShellThatClosesDescriptors) {
    start(tsr::testing::binary_dir() +
          "/tessera run -n 2 python3 -c 'import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))'");
    expect_sums("tessera run", 2);
}

TEST_F(Launchers, Mpirun) {
    if (std::system("command -v mpirun > /dev/null") != 0) GTEST_SKIP() << "mpirun is not installed (openmpi-bin)";
    start("mpirun --allow-run-as-root --oversubscribe -n 3");
    expect_sums("mpirun (Open MPI)", 3);
}

TEST_F(Launchers, TorchrunByItsVariables) {
    const std::string port = std::to_string(testing::free_port());
    start_by_hand(3, [&](int rank) -> std::map<std::string, std::string> {
        const std::string number = std::to_string(rank);
        return {{"RANK", number},
                {"LOCAL_RANK", number},
                {"ROLE_RANK", number},
                {"GROUP_RANK", "0"},
                {"ROLE_NAME", "default"},
                {"WORLD_SIZE", "3"},
                {"LOCAL_WORLD_SIZE", "3"},
                {"ROLE_WORLD_SIZE", "3"},
                {"GROUP_WORLD_SIZE", "1"},
                {"MASTER_ADDR", "127.0.0.1"},
                {"MASTER_PORT", port},
                {"TORCHELASTIC_RESTART_COUNT", "0"},
                {"TORCHELASTIC_MAX_RESTARTS", "0"},
                {"TORCHELASTIC_RUN_ID", "none"},
                {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
    });
    expect_sums("torchrun", 3);
}

TEST_F(Launchers, AProcessBelongsToOneJobAfterAnother) {
    const std::string ports = fmt::format("{} {} {}", testing::free_port(), testing::free_port(), testing::free_port());
    start_by_hand(
        3,
        [&](int rank) -> std::map<std::string, std::string> {
            return {{"RANK", std::to_string(rank)},
                    {"WORLD_SIZE", "3"},
                    {"LOCAL_WORLD_SIZE", "3"},
                    {"MASTER_ADDR", "127.0.0.1"},
                    {"PORTS", ports}};
        },
        "Belongs");
}

// The variables of a task of a step on `nodes` nodes of one task each, or on one node of all.
std::map<std::string, std::string> slurm_task(int rank, int tasks, const std::string& nodes, bool one_node) {
    const std::string number = std::to_string(rank);
    const std::string all = std::to_string(tasks);
    const std::string job = std::to_string(::getpid());
    return {{"SLURM_JOB_ID", job},
            {"SLURM_JOBID", job},
            {"SLURM_STEP_ID", "0"},
            {"SLURM_STEPID", "0"},
            {"SLURM_PROCID", number},
            {"SLURM_LOCALID", one_node ? number : "0"},
            {"SLURM_NODEID", one_node ? "0" : number},
            {"SLURM_NTASKS", all},
            {"SLURM_STEP_NUM_TASKS", all},
            {"SLURM_STEP_NUM_NODES", one_node ? "1" : all},
            {"SLURM_STEP_NODELIST", nodes},
            {"SLURM_STEP_TASKS_PER_NODE", one_node ? all : fmt::format("1(x{})", tasks)}};
}

TEST_F(Launchers, SrunByItsVariables) {
    start_by_hand(3, [](int rank) { return slurm_task(rank, 3, "node7", true); });
    expect_sums("srun", 3);
}

TEST_F(Launchers, SrunOnSeveralNodesByItsVariables) {
    start_by_hand(2, [](int rank) {
        auto variables = slurm_task(rank, 2, "localhost,node8", false);
        variables["TESSERA_HOST_ID"] = fmt::format("node {}", rank);  // so the ranks share no memory
        return variables;
    });
    expect_sums("srun", 2, "gloo");
}

// Two pods on one node, one on another: nobody says so, the ranks find out.
TEST_F(Launchers, KubernetesByItsVariables) {
    const std::string port = std::to_string(testing::free_port());
    start_by_hand(3, [&](int rank) -> std::map<std::string, std::string> {
        return {{"JOB_COMPLETION_INDEX", std::to_string(rank)},
                {"WORLD_SIZE", "3"},
                {"MASTER_ADDR", "localhost"},
                {"MASTER_PORT", port},
                {"TESSERA_STORE_BIND", "127.0.0.1"},
                {"TESSERA_HOST_ID", rank == 1 ? "node 2" : "node 1"}};
    });
    expect_sums("Kubernetes", 3, "hierarchical");
}

TEST_F(Launchers, ARankThatLeavesWithExitCodeZeroIsToldAsTheRootCause) {
    for (const char* backend : {"shm", "gloo"}) {
        const int status = std::system(
            fmt::format("{} run -n 3 --env TESSERA_BACKEND={} {} --gtest_filter=AsARank.Leaves* > {}/log 2>&1",
                        tsr::testing::binary_dir() + "/tessera", backend, self(), directory_.path().string())
                .c_str());
        EXPECT_EQ(WEXITSTATUS(status), 1) << "the job has failed, though its cause ended with 0";
        EXPECT_THAT(log(), AllOf(HasSubstr("the job failed: rank 1 ended with exit code 0 (its peers still needed it"),
                                 HasSubstr("because rank 1 left")))
            << backend;
    }
}

TEST_F(Launchers, ARankThatIsExitingWhileOthersAreEndedHasEndedByItself) {
    const int status =
        std::system(fmt::format("{} run -n 2 {} --gtest_filter=AsARank.Takes* > {}/log 2>&1",
                                tsr::testing::binary_dir() + "/tessera", self(), directory_.path().string())
                        .c_str());
    EXPECT_EQ(WEXITSTATUS(status), 1);
    EXPECT_THAT(log(), AllOf(HasSubstr("the job failed: rank 1 ended with exit code 0 (its peers still needed it"),
                             HasSubstr("because rank 1 left")));
}

// Not after the communicator's timeout, which is longer than a test may take.
TEST_F(Launchers, ARankThatEndsWithExitCodeZeroBeforeItJoinedIsToldAtOnce) {
    for (const int absent : {0, 2}) {
        const int status =
            std::system(fmt::format("{} run -n 3 --env ABSENT={} {} --gtest_filter=AsARank.Joins* > {}/log 2>&1",
                                    tsr::testing::binary_dir() + "/tessera", absent, self(), directory_.path().string())
                            .c_str());
        EXPECT_EQ(WEXITSTATUS(status), 3) << log();
        EXPECT_THAT(
            log(), AllOf(HasSubstr(fmt::format("the job failed: rank {} ended with exit code 0 (its peers still needed "
                                               "it: it had not joined",
                                               absent)),
                         // Whoever is told first; the launcher may end the other one before it says so, too.
                         ContainsRegex(fmt::format("rank [0-2]: rank {} exited with status 0 before it joined the "
                                                   "communicator of 3 ranks",
                                                   absent))));
    }
}

// It waits for rank 0, which may come; its own settings do not get better.
TEST_F(Launchers, ARankThatCannotUseItsOwnTokenSaysSoAtOnce) {
    const std::map<std::string, std::string> one_of_two{
        {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_PORT", "12345"}};
    const std::map<std::string, std::string> wrong{
        {"TESSERA_TOKEN", "xyz"}, {"TESSERA_TOKEN_FILE", "/no/such/token"}, {"TESSERA_INSECURE", "maybe"}};
    for (const auto& [name, value] : wrong) {
        auto variables = one_of_two;
        variables[name] = value;
        testing::Child rank = testing::in_child(variables, [&name = name] {
            CommOptions options;
            options.timeout = milliseconds{3000};
            try {
                (void)communicator_from_environment(options);
            } catch (const Error& error) {
                if (std::string_view(error.what()).find(name) == std::string_view::npos) throw;
            }
        });
        EXPECT_EQ(rank.wait(), 0) << name;
    }
}

TEST_F(Launchers, Alone) {
    start("");
    expect_sums("no launcher", 1, "self");
}

}  // namespace
}  // namespace tsr
