// The `tessera` command itself: commands it does not know, usage, and what `tessera env` finds.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "base/json.hpp"
#include "mounted.hpp"
#include "places.hpp"
#include "temporary_directory.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Result {
    int code = -1;
    std::string out;  // and standard error
};

// `variables`: "NAME=value ".
Result tessera(const std::string& arguments, const std::string& variables = "") {
    Result result;
    const std::string command = variables + tsr::testing::binary_dir() + "/tessera " + arguments;
    FILE* pipe = ::popen((command + " 2>&1 < /dev/null").c_str(), "r");
    char bytes[4096];
    for (size_t got; (got = std::fread(bytes, 1, sizeof bytes, pipe)) > 0;) result.out.append(bytes, got);
    result.code = WEXITSTATUS(::pclose(pipe));
    return result;
}

TEST(Command, UnknownOnesAreNamedBesideTheKnown) {
    const Result result = tessera("foo -n 3");
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.out, StartsWith("tessera: unknown command 'foo'; available: run, env, ckpt"));
}

TEST(Command, SoAreThoseOfAGroup) {
    EXPECT_THAT(tessera("ckpt foo x").out,
                StartsWith("tessera ckpt: unknown command 'foo'; available: ls, info, tree"));
    EXPECT_THAT(tessera("ckpt").out, StartsWith("tessera ckpt: missing command; available: ls, info, tree"));
    EXPECT_THAT(tessera("").out, StartsWith("tessera: missing command; available: run, env, ckpt"));
}

TEST(Command, WrongUsageIsExitCodeTwo) {
    for (const char* arguments : {"", "--foo", "env a b", "env /no/such/directory", "ckpt", "ckpt foo", "run",
                                  "run --nnodes 2 true", "run --grace-s x true"}) {
        EXPECT_EQ(tessera(arguments).code, 2) << arguments;
    }
}

TEST(Command, TextThatIsNotANumberIsNamed) {
    EXPECT_THAT(tessera("run --timeout-s abc true").out,
                StartsWith("tessera run: --timeout-s: expected a number of seconds, got 'abc'\n"));
    EXPECT_THAT(tessera("run --min-ranks 2.5 true").out,
                StartsWith("tessera run: --min-ranks: expected a whole number, got '2.5'\n"));
    EXPECT_THAT(tessera("ckpt gc x --keep many").out, HasSubstr("--keep: expected a whole number, got 'many'\n"));
    EXPECT_THAT(tessera("ckpt diff a b --atol tiny").out, HasSubstr("--atol: expected a number, got 'tiny'\n"));
    EXPECT_THAT(tessera("ckpt diff a b --atol=-1").out, HasSubstr("--atol: must not be negative, got '-1'\n"));
}

TEST(Command, OutputThatCannotBeWrittenIsAnError) {
    const Result result = tessera("env --json 2>&1 > /dev/full || exit $?");
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.out, HasSubstr("tessera: cannot write standard output: No space left on device"));
}

TEST(Command, WrongUsageIsToldWithTheUsage) {
    const Result result = tessera("ckpt verify a b");
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.out, AllOf(StartsWith("tessera ckpt verify: The following argument was not expected: b\n"),
                                  HasSubstr("\nUsage: tessera ckpt verify [OPTIONS] path\n"),
                                  HasSubstr("Run `tessera ckpt verify --help` for details")));
    EXPECT_THAT(tessera("ckpt verify a b c").out, HasSubstr("The following arguments were not expected: b c\n"));
    EXPECT_THAT(tessera("run").out, AllOf(StartsWith("tessera run: no command; write"),
                                          HasSubstr("\nUsage: tessera run [OPTIONS] CMD [ARGS...]")));
    EXPECT_THAT(tessera("run --help").out, HasSubstr("Usage: tessera run [OPTIONS] CMD [ARGS...]"));
}

TEST(Command, HelpTellsDefaults) {
    const Result result = tessera("run --help");
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.out, AllOf(ContainsRegex("--grace-s FLOAT[= []+30"),
                                  ContainsRegex("--kill-grace-s,--shutdown-timeout FLOAT[= []+5"),
                                  ContainsRegex("--on-loss TEXT[= []+restart"), ContainsRegex("N[= []+1")));
}

TEST(Command, EnvTriesTransportsAndDirectIo) {
    const testing::TemporaryDirectory directory;
    const Result result = tessera("env --json " + directory.path().string());
    ASSERT_EQ(result.code, 0) << result.out;
    const Json facts = Json::parse(result.out, "env");
    EXPECT_EQ(facts.at("transports").at("shm").as_string(), "usable");
    EXPECT_EQ(facts.at("transports").at("gloo").as_string(), "usable");
    EXPECT_GE(facts.at("usable_cores").as_int(), 1);
    EXPECT_EQ(facts.at("directory").as_string(), directory.path().string());
    const bool direct = facts.at("direct_io").as_string() == "yes";
    EXPECT_THAT(facts.at("direct_io").as_string(), ::testing::AnyOf("yes", StartsWith("no: it ")));
    EXPECT_THAT(facts.at("writes").as_string(), StartsWith(direct ? "O_DIRECT" : "through the page cache"));
    EXPECT_THAT(facts.at("preallocation").as_string(), ::testing::AnyOf("yes", StartsWith("no: ")));
    EXPECT_NE(facts.at("file_system").as_string(), "");
    EXPECT_GT(facts.at("free_bytes").as_int(), 0);
    EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "the probe is removed";
    EXPECT_THAT(tessera("env /proc").out, HasSubstr("unknown: cannot create /proc/.tessera-probe-"));
    const Json of_memory = Json::parse(tessera("env --json /dev/shm").out, "env");
    EXPECT_EQ(of_memory.at("file_system").as_string(), "tmpfs");
    EXPECT_EQ(of_memory.at("temporary_directory").at("directory").as_string(),
              std::filesystem::temp_directory_path().string());
    EXPECT_THAT(tessera("env").out, HasSubstr("shm usable, gloo usable"));
}

TEST(Command, EnvFindsTheDriverItsDevicesAndNccl) {
    const std::string tests = testing::binary_dir() + "/tests/";
    const auto with = [&](int devices) {
        return fmt::format(
            "LD_LIBRARY_PATH={0}simulated_cuda:{0}mock_nccl TESSERA_SIMULATED_CUDA_DEVICES={1} "
            "TESSERA_CUDA_KERNELS={0}simulated_cuda/libtessera_cuda.so ",
            tests, devices);
    };
    const Json facts = Json::parse(tessera("env --json", with(2)).out, "env");
    const Json without = Json::parse(tessera("env --json", with(0)).out, "env");
    EXPECT_THAT(
        tessera("env", with(2)).out,
        HasSubstr("name Simulated GPU 1, capability 9.0, memory_bytes 17179869184, reaches 0, links to 0, rank 0, "
                  "atomics true"));
    EXPECT_EQ(facts.at("cuda_driver").as_string(), "for CUDA 13.0");
    ASSERT_EQ(facts.at("cuda_devices").as_array().size(), 2U);
    EXPECT_EQ(facts.at("cuda_devices").as_array()[0].at("memory_bytes").as_int(), int64_t{16} << 30);
    EXPECT_EQ(facts.at("cuda_devices").as_array()[0].at("reaches").dump(), "[1]");
    EXPECT_THAT(facts.at("cuda_kernels").as_string(),
                ContainsRegex("^[0-9a-f]{16}, for simulated devices, /.*/simulated_cuda/libtessera_cuda\\.so$"));
    EXPECT_EQ(facts.at("nccl").as_string(), "2.29.7, " + tests + "mock_nccl/libnccl.so.2");
    EXPECT_THAT(without.at("cuda_driver").as_string(),
                AllOf(StartsWith("unusable: "), HasSubstr("the NVIDIA driver finds no device")));
    EXPECT_TRUE(without.at("cuda_devices").as_array().empty());
}

// Torchrun inside a pod of an Indexed Job.
TEST(Command, EnvSaysWhichLauncherWon) {
    const std::string variables = "JOB_COMPLETION_INDEX=1 RANK=2 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=29500 ";
    const Json facts = Json::parse(tessera("env --json", variables).out, "env");
    EXPECT_EQ(facts.at("launcher").as_string(), "torchrun");
    EXPECT_EQ(facts.at("rank").as_int(), 2);
    EXPECT_THAT(facts.at("local_world_size").as_string(), StartsWith("unknown: the ranks compare their hosts"));
    EXPECT_EQ(facts.at("launchers_found").dump(),
              R"([{"launcher":"torchrun","used":true,"variables":{"RANK":"2","WORLD_SIZE":"4","MASTER_ADDR":"h",)"
              R"("MASTER_PORT":"29500"}},{"launcher":"Kubernetes","used":false,"variables":)"
              R"({"JOB_COMPLETION_INDEX":"1","WORLD_SIZE":"4","MASTER_ADDR":"h","MASTER_PORT":"29500"}}])");
    const Json wrong = Json::parse(tessera("env --json", "JOB_COMPLETION_INDEX=1 ").out, "env");
    EXPECT_THAT(wrong.at("problem").as_string(), HasSubstr("WORLD_SIZE is not"));
    EXPECT_EQ(wrong.at("launchers_found").as_array().size(), 1U) << "shown when it is wrong, too";
    EXPECT_EQ(Json::parse(tessera("env --json").out, "env").at("launchers_found").dump(), "[]");
}

// As a save finds it (WritePath in tests/checkpoint/), on a file system that takes no O_DIRECT.
TEST(Command, EnvTellsWhyWritesAreNotDirect) {
    const testing::TemporaryDirectory directory;
    const testing::Mounted ramfs("ramfs", directory.path() / "ramfs");
    if (!ramfs.is_there()) GTEST_SKIP() << "mounting takes a right that this process lacks";
    const Json facts = Json::parse(tessera("env --json " + ramfs.path()).out, "env");
    EXPECT_THAT(facts.at("direct_io").as_string(), StartsWith("no: it refuses to open files with O_DIRECT"));
    EXPECT_THAT(facts.at("writes").as_string(), StartsWith("through the page cache"));
}

TEST(Command, EnvWarnsOfAnUnknownLogLevel) {
    ::setenv("TESSERA_LOG", "loud", 1);
    const Result result = tessera("env");
    ::unsetenv("TESSERA_LOG");
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.out, HasSubstr("unknown TESSERA_LOG level 'loud', using warning; use debug, info"));
}

TEST(Command, EnvEndsWithOneIfTheTokenCannotBeUsed) {
    ::setenv("TESSERA_TOKEN", "abc", 1);
    const Result alone = tessera("env");
    const char* const job[][2] = {
        {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29999"}};
    for (const auto& [name, value] : job) ::setenv(name, value, 1);
    const Result joined = tessera("env --json");
    ::setenv("TESSERA_INSECURE", "1", 1);
    const Result insecure = tessera("env");
    ::unsetenv("TESSERA_INSECURE");
    for (const auto& [name, value] : job) ::unsetenv(name);
    ::unsetenv("TESSERA_TOKEN");
    EXPECT_EQ(alone.code, 0) << "one rank needs none";
    EXPECT_THAT(alone.out, ContainsRegex("token +unusable: the job token "));
    EXPECT_EQ(joined.code, 1);
    EXPECT_THAT(Json::parse(joined.out, "env").at("problem").as_string(), HasSubstr("the job token "));
    EXPECT_EQ(insecure.code, 0) << insecure.out;
}

// What cannot be used is told with its reason.
TEST(Command, EnvTellsWhyATransportCannotBeUsed) {
    ::setenv("TESSERA_SOCKET_IFNAME", "no-such-interface", 1);
    const Result result = tessera("env");
    ::unsetenv("TESSERA_SOCKET_IFNAME");
    EXPECT_THAT(result.out, HasSubstr("gloo unusable: rank 0: Gloo cannot listen on interface no-such-interface"));
}

}  // namespace
}  // namespace tsr
