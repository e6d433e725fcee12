// Ranks under `tessera run` and under another launcher make a communicator from their environment. The rank is this very
// test program: it is started again with the one disabled test below, under the launcher.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "launch/environment.hpp"
#include "launch/from_environment.hpp"
#include "processes.hpp"

namespace tsr {
namespace {

// Sums 1 + rank over all ranks. The tests below start it as the ranks of a job, which leave their results in $D; by itself
// it is the job of one rank.
TEST(AsARank, SumsOverTheRanks) {
    CommOptions options = CommOptions::from_environment();
    options.timeout = milliseconds{30000};
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
                << name_of(JobEnvironment::detect().launcher) << " " << n << " " << value;
        }
        comm->finalize();
    }
}

class Launchers : public ::testing::Test {
   protected:
    [[nodiscard]] std::string rank_command() const {
        char self[PATH_MAX] = {};
        EXPECT_GT(::readlink("/proc/self/exe", self, sizeof self - 1), 0);
        return fmt::format("{} --gtest_filter=AsARank.*", self);
    }
    void start(const std::string& launcher) const {
        const testing::Environment environment(
            {{"D", directory_.path().string()}, {"XDG_RUNTIME_DIR", directory_.path().string()}});
        ::chmod(directory_.path().c_str(), 0700);
        const std::string log = (directory_.path() / "log").string();
        const int status =
            std::system(fmt::format("{} {} > {} 2>&1 < /dev/null", launcher, rank_command(), log).c_str());
        std::ostringstream text;
        text << std::ifstream(log).rdbuf();
        ASSERT_EQ(status, 0) << text.str();
    }
    void expect_sums(const std::string& launcher, int world_size) const {
        for (int rank = 0; rank < world_size; ++rank) {
            for (int round = 0; round < 2; ++round) {
                std::ifstream file(directory_.path() / fmt::format("{}.{}", rank, round));
                std::string line;
                std::getline(file, line);
                EXPECT_EQ(line, fmt::format("{} {} {}", launcher, world_size, world_size * (world_size + 1) / 2));
            }
        }
    }
    testing::TemporaryDirectory directory_;
};

TEST_F(Launchers, TesseraRun) {
    start(TESSERA_BINARY_DIR "/tessera run -n 3");
    expect_sums("tessera run", 3);
}

TEST_F(Launchers, TesseraRunInsecure) {
    start(TESSERA_BINARY_DIR "/tessera run --insecure -n 2");
    expect_sums("tessera run", 2);
}

TEST_F(Launchers, TesseraRunThroughAShellThatClosesDescriptors) {
    start(TESSERA_BINARY_DIR
          "/tessera run -n 2 python3 -c 'import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))'");
    expect_sums("tessera run", 2);
}

TEST_F(Launchers, Mpirun) {
    if (std::system("command -v mpirun > /dev/null") != 0) GTEST_SKIP() << "mpirun is not installed (openmpi-bin)";
    start("mpirun --allow-run-as-root --oversubscribe -n 3");
    expect_sums("mpirun (Open MPI)", 3);
}

TEST_F(Launchers, Alone) {
    start("");
    expect_sums("no launcher", 1);
}

}  // namespace
}  // namespace tsr
