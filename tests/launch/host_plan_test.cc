// Hostfiles, filters, environment files, plans and command lines of schedulers: each rule and each message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "launch/binding.hpp"
#include "launch/hosts/exported_environment.hpp"
#include "launch/hosts/host_name.hpp"
#include "launch/hosts/hostfile.hpp"
#include "launch/hosts/plan.hpp"
#include "launch/hosts/scheduler_command.hpp"
#include "launch/hosts/selection.hpp"
#include "seed.hpp"
#include "temporary_directory.hpp"

namespace tsr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// The message of the INVALID_ARGUMENT (or `code`) that `call` throws.
std::string refusal(const std::function<void()>& call, Code code = Code::invalid_argument) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        return error.what();
    }
    return "nothing was refused";
}

TEST(Hostfile, Entries) {
    const std::pair<const char*, std::vector<HostSlots>> table[] = {
        {"worker-1 slots=4\nworker-2 slots=2\n", {{"worker-1", 4}, {"worker-2", 2}}},
        {"b slots=1\na slots=1", {{"b", 1}, {"a", 1}}},  // the file's order
        {"# nodes\n\n   \n  a   slots=4  \r\n\t# more\nb\tslots=8", {{"a", 4}, {"b", 8}}},
        {"a slots=4 max_slots=8\nb slots=2 # two", {{"a", 4}, {"b", 2}}},
        {"a slots=4abc", {{"a", 4}}},  // as DeepSpeed reads it
        {"a slots=0\nb slots=0004096", {{"a", 0}, {"b", 4096}}},
        {"10.0.0.7 slots=1\n_x.y-z slots=1", {{"10.0.0.7", 1}, {"_x.y-z", 1}}},
    };
    for (const auto& [text, hosts] : table) EXPECT_EQ(parse_hostfile(text, "F"), hosts) << text;
}

TEST(Hostfile, Messages) {
    const std::pair<std::string, const char*> table[] = {
        {"a slots=1\nworker-2 slot=4\n", "hostfile F, line 2: bad entry 'worker-2 slot=4'; expected HOST slots=N"},
        {"worker", "line 1: bad entry 'worker'"},
        {"a slots=", "bad entry 'a slots='"},
        {"a slots=-1", "bad entry 'a slots=-1'"},
        {"a slots = 4", "bad entry"},
        {"a max_slots=8 slots=4", "bad entry"},
        {"a slots=x4", "bad entry"},
        {"a slots=1\nb slots=1\na slots=1", "line 3: host 'a' has multiple entries"},
        {"", "hostfile F is empty"},
        {"# only\n\n", "hostfile F is empty"},
        {"a slots=4097", "host 'a' has 4097 slots; a host can have at most 4096"},
        {"a slots=1000000000", "host 'a' has 1000000000 slots"},
        {"a slots=99999999999999999999999", "has 99999999999999999999999 slots"},
        {"-oProxyCommand=id slots=4", "host '-oProxyCommand=id' begins with '-', so ssh would take it for an option"},
        {"root@a slots=4", "host 'root@a' has a user"},
        {std::string(254, 'a') + " slots=1", "has more than 253 characters"},
        {".a slots=1", "is not a host name"},
        {std::string("a\0b slots=1", 11), "is not a host name"},
        {std::string(max_hostfile_bytes + 1, '\n'), "hostfile F is larger than 1048576 bytes"},
    };
    for (const auto& [text, message] : table) {
        EXPECT_THAT(refusal([&] { (void)parse_hostfile(text, "F"); }), HasSubstr(message));
    }
    std::string many;
    for (size_t i = 0; i <= max_hosts; ++i) many += "h" + std::to_string(i) + " slots=1\n";
    EXPECT_THAT(refusal([&] { (void)parse_hostfile(many, "F"); }), HasSubstr("line 4097: a job can have at most 4096"));
}

TEST(Hostfile, NamesWithCharactersOfAShellAreRefused) {
    for (const char c : std::string("$`;&|<>(){}[]*?!~#'\"\\:=,%^+/")) {
        EXPECT_NE(why_no_host_name(std::string("a") + c + "b"), "") << c;
    }
}

TEST(Hostfile, FilesThatCannotBeReadAreNamed) {
    const testing::TemporaryDirectory directory;
    const std::string path = (directory.path() / "hosts").string();
    EXPECT_THAT(refusal([&] { (void)read_hostfile(path); }, Code::not_found),
                HasSubstr("cannot read hostfile " + path + ": it does not exist"));
    EXPECT_THAT(refusal([&] { (void)read_hostfile(directory.path().string()); }, Code::io),
                HasSubstr("cannot read hostfile"));
    std::ofstream(path) << "a slots=3\n";
    EXPECT_EQ(read_hostfile(path), (std::vector<HostSlots>{{"a", 3}}));
    EXPECT_THAT(refusal([] { (void)read_hostfile("/dev/zero"); }), HasSubstr("is larger than"));  // and it ends
}

const std::vector<HostSlots> four_and_two{{"w2", 4}, {"w1", 2}, {"none", 0}};

std::vector<HostSelection> chosen(const Filter& filter) { return select_hosts(four_and_two, filter, "hostfile F"); }

TEST(Selection, Filters) {
    struct Case {
        Filter filter;
        std::vector<HostSelection> selected;
    };
    const Case table[] = {
        {{}, {{"w2", {0, 1, 2, 3}}, {"w1", {0, 1}}}},  // the file's order; no slot: dropped
        {{"w1", ""}, {{"w1", {0, 1}}}},
        {{"w1@w2:1", ""}, {{"w2", {1}}, {"w1", {0, 1}}}},
        {{"w2:3,0,3", ""}, {{"w2", {0, 3}}}},
        {{"w2:3@w1:0@w2:1", ""}, {{"w2", {1, 3}}, {"w1", {0}}}},
        {{"w2:0-2", ""}, {{"w2", {0, 1, 2}}}},
        {{"w2: 0 , 2-3 ", ""}, {{"w2", {0, 2, 3}}}},
        {{"", "w2"}, {{"w1", {0, 1}}}},
        {{"", "w2:0@w1:0,1"}, {{"w2", {1, 2, 3}}}},
        {{"", "w2:0-2"}, {{"w2", {3}}, {"w1", {0, 1}}}},
        {{"", "", 1, -1}, {{"w2", {0, 1, 2, 3}}}},
        {{"", "", 3, -1}, {{"w2", {0, 1, 2, 3}}, {"w1", {0, 1}}}},
        {{"", "", 2, 2}, {{"w2", {0, 1}}, {"w1", {0, 1}}}},
        {{"", "", 1, 4}, {{"w2", {0, 1, 2, 3}}}},
        {{"", "", 0, 0}, {{"w2", {0, 1, 2, 3}}, {"w1", {0, 1}}}},
    };
    for (const Case& c : table) EXPECT_EQ(chosen(c.filter), c.selected) << c.filter.include << c.filter.exclude;
}

TEST(Selection, Messages) {
    const std::pair<Filter, const char*> table[] = {
        {{"w1", "w2"}, "--include and --exclude are mutually exclusive"},
        {{"w1", "", 1, -1}, "--num_nodes and --num_gpus cannot be used with --include or --exclude"},
        {{"", "w1", -1, 0}, "--num_nodes and --num_gpus cannot be used with --include or --exclude"},
        {{"w9:0", ""}, "--include: host 'w9' not found in hostfile F, which has w2, w1, none"},
        {{"", "w2:0@@w1"}, "--exclude: host '' not found in hostfile F"},
        {{"w2:4", ""}, "--include: no slot 4 on host 'w2', which has 4 (hostfile F says slots=4; slots are"},
        {{"w2:2-9", ""}, "no slot 9 on host 'w2'"},
        {{"w2:99999999999999", ""}, "no slot 99999999999999 on host 'w2'"},
        {{"w2:-1", ""}, "no slot -1 on host 'w2'"},
        {{"none:0", ""}, "no slot 0 on host 'none', which has 0"},
        {{"w2:0:1", ""}, "--include 'w2:0:1': more than one ':' in 'w2:0:1'"},
        {{"w2:", ""}, "--include: '' of host 'w2' is not a slot"},
        {{"w2:a", ""}, "'a' of host 'w2' is not a slot; expected a number or a range such as 0-3"},
        {{"w2:1-", ""}, "'1-' of host 'w2' is not a slot"},
        {{"w2:3-1", ""}, "range '3-1' of host 'w2' goes down"},
        {{"", "w2@w1"}, "no slot is left by --exclude: hostfile F"},
        {{"none", ""}, "no slot is left by --include: hostfile F"},
        {{"", "", 4, -1}, "--num_nodes 4: hostfile F has 3 hosts"},
        {{"", "", -1, 3}, "--num_gpus 3: host 'w1' has 2 slots (hostfile F)"},
    };
    for (const auto& [filter, message] : table) {
        EXPECT_THAT(refusal([&] { (void)chosen(filter); }), HasSubstr(message));
    }
    const std::vector<HostSlots> large{{"a", 4096}, {"b", 1}};
    EXPECT_THAT(refusal([&] { (void)select_hosts(large, {}, "F"); }), HasSubstr("more than 4096 slots"));
}

TEST(Selection, DevicesAreTheVisibleOnes) {
    EXPECT_THAT(visible_devices(2, nullptr), ElementsAre("0", "1"));
    EXPECT_THAT(visible_devices(0, "6, 4"), ElementsAre("6", "4"));
    EXPECT_THAT(visible_devices(8, ""), ElementsAre());
    EXPECT_THAT(visible_devices(8, "3,-1,4"), ElementsAre("3"));  // CUDA reads no further
    EXPECT_THAT(visible_devices(8, "GPU-8932f937,MIG-7"), ElementsAre("GPU-8932f937", "MIG-7"));
    EXPECT_THAT(refusal([] { (void)visible_devices(8, "1,2,1"); }), HasSubstr("device 1 is there twice"));
    EXPECT_THAT(devices_of({"a", {1, 2}}, {"6", "4", "7"}), ElementsAre("4", "7"));
    EXPECT_THAT(refusal([] { (void)devices_of({"a", {0, 1}}, {"6"}); }),
                HasSubstr("host 'a' has no device for slot 1: 1 is visible"));
}

TEST(Selection, RanksAtAHost) {
    EXPECT_EQ(parse_ranks_at("2:4").count, "2:4");
    EXPECT_EQ(parse_ranks_at("2:4").host, "");
    EXPECT_EQ(parse_ranks_at("gpu@w-1").count, "gpu");
    EXPECT_EQ(parse_ranks_at("gpu@w-1").host, "w-1");
    EXPECT_THAT(refusal([] { (void)parse_ranks_at("2@-a"); }), HasSubstr("-n 2@-a: host '-a' begins with '-'"));
    EXPECT_THAT(refusal([] { (void)parse_ranks_at("2@"); }), HasSubstr("has no name"));
}

TEST(EnvironmentFile, Entries) {
    EXPECT_THAT(parse_environment_file("# NCCL\n\nB=2\n  A=x=y $(id) ; `id`  \r\nB=\n_c1='q'", "F"),
                ElementsAre(Pair("A", "x=y $(id) ; `id`"), Pair("B", ""), Pair("_c1", "'q'")));
    EXPECT_THAT(parse_environment_file("", "F"), ElementsAre());
    for (const char* line : {"A", "=1", "1A=1", "A B=1", "export A=1", "A;id=1", "-x=1"}) {
        EXPECT_THAT(refusal([&] { (void)parse_environment_file(std::string("X=1\n") + line, "F"); }),
                    HasSubstr(std::string("F, line 2: '") + line + "' is not NAME=VALUE"));
    }
}

TEST(EnvironmentFile, HomeComesBeforeTheDirectory) {
    const testing::TemporaryDirectory directory;
    const std::string home = (directory.path() / "home").string();
    const std::string here = (directory.path() / "here").string();
    for (const std::string& made : {home, here}) std::filesystem::create_directory(made);
    ::unsetenv("DS_ENV_FILE");
    EXPECT_THAT(deepspeed_environment_files(home, here), ElementsAre());
    std::ofstream(home + "/.deepspeed_env") << "A=home\nB=home\n";
    EXPECT_THAT(deepspeed_environment_files(home, here), ElementsAre(Pair("A", "home"), Pair("B", "home")));
    std::ofstream(here + "/.deepspeed_env") << "B=here\n";
    EXPECT_THAT(deepspeed_environment_files(home, here), ElementsAre(Pair("A", "home"), Pair("B", "here")));
    std::ofstream(home + "/other") << "C=3\n";
    ::setenv("DS_ENV_FILE", "other", 1);
    EXPECT_THAT(deepspeed_environment_files(home, here), ElementsAre(Pair("C", "3")));
    ::setenv("DS_ENV_FILE", (here + "/.deepspeed_env").c_str(), 1);
    EXPECT_THAT(deepspeed_environment_files(home, here), ElementsAre(Pair("B", "here")));
    ::unsetenv("DS_ENV_FILE");
}

TEST(EnvironmentFile, ExportedPrefixes) {
    for (const char* name : {"MLFLOW_RUN", "PYTHONPATH", "MV2_X", "UCX_TLS", "NCCL_DEBUG"}) {
        EXPECT_TRUE(is_exported(name)) << name;
    }
    for (const char* name : {"HOME", "XNCCL", "nccl_debug", "LD_PRELOAD", ""}) EXPECT_FALSE(is_exported(name)) << name;
}

TEST(Plan, OfSlots) {
    const LaunchPlan plan = plan_of_slots({"python3", "a b.py"}, {{"w2", {1, 3}}, {"w1", {0}}});
    EXPECT_EQ(plan.world_size(), 3);
    EXPECT_EQ(plan.text(),
              "3 ranks on 2 hosts\n"
              "node 0: w2  CUDA_VISIBLE_DEVICES=1,3\n"
              "  ranks 0-1 (local 0-1)  python3 \"a b.py\"\n"
              "node 1: w1  CUDA_VISIBLE_DEVICES=0\n"
              "  rank 2 (local 0)  python3 \"a b.py\"\n");
    EXPECT_EQ(plan.json().dump(),
              R"({"world_size":3,"programs":[["python3","a b.py"]],"hosts":[)"
              R"({"host":"w2","node_rank":0,"devices":["1","3"],"ranks":[)"
              R"({"rank":0,"local_rank":0,"program":0,"slot":1},{"rank":1,"local_rank":1,"program":0,"slot":3}]},)"
              R"({"host":"w1","node_rank":1,"devices":["0"],"ranks":[)"
              R"({"rank":2,"local_rank":0,"program":0,"slot":0}]}]})");
}

TEST(Plan, OfProgramsGroupsByHost) {
    const LaunchPlan plan = plan_of_programs({{{"a"}, 2, "h1"}, {{"b"}, 1, "h2"}, {{"c"}, 1, "h1"}});
    EXPECT_EQ(plan.text(),
              "4 ranks on 2 hosts\n"
              "node 0: h1\n"
              "  ranks 0-1 (local 0-1)  a\n"
              "  rank 2 (local 2)  c\n"
              "node 1: h2\n"
              "  rank 3 (local 0)  b\n");
}

TEST(SchedulerCommand, OfEach) {
    const LaunchPlan equal = plan_of_slots({"python3", "t.py"}, {{"a", {0, 1}}, {"b", {0, 1}}});
    const LaunchPlan unequal = plan_of_slots({"t"}, {{"a", {0, 1}}, {"b", {0}}});
    const SchedulerRun run{{"MASTER_ADDR", "TESSERA_TOKEN"}, {"--verbose"}, true};
    EXPECT_THAT(scheduler_command(scheduler_named("openmpi"), unequal, run),
                ElementsAre("mpirun", "-n", "3", "--host", "a:2,b:1", "-x", "MASTER_ADDR", "-x", "TESSERA_TOKEN",
                            "--verbose", "t"));
    EXPECT_THAT(scheduler_command(scheduler_named("mpich"), equal, run),
                ElementsAre("mpirun", "-n", "4", "-ppn", "2", "-hosts", "a,b", "-genvlist", "MASTER_ADDR,TESSERA_TOKEN",
                            "--verbose", "python3", "t.py"));
    EXPECT_EQ(scheduler_command(scheduler_named("impi"), equal, run),
              scheduler_command(scheduler_named("mpich"), equal, run));
    EXPECT_THAT(scheduler_command(scheduler_named("slurm"), equal, run),
                ElementsAre("srun", "-n", "4", "--nodes", "2", "--ntasks-per-node", "2", "--nodelist", "a,b",
                            "--export=ALL", "--gpus-per-node", "2", "--verbose", "python3", "t.py"));
    for (const char* launcher : {"mpich", "impi", "slurm"}) {
        EXPECT_THAT(refusal([&] { (void)scheduler_command(scheduler_named(launcher), unequal, run); }),
                    HasSubstr("needs equally many slots on every host, but a has 2 and b has 1"));
    }
    const LaunchPlan second = plan_of_slots({"t"}, {{"a", {1}}});
    EXPECT_THAT(refusal([&] { (void)scheduler_command(Scheduler::open_mpi, second, run); }),
                HasSubstr("slot 0 is left out, slot 1 is used"));
    EXPECT_THAT(refusal([] { (void)scheduler_named("mvapich"); }), HasSubstr("--launcher mvapich is not supported"));
}

// Whatever the bytes: a result that keeps the promises, or INVALID_ARGUMENT.
TEST(HostParsers, TakeRandomBytes) {
    const testing::Seed seed;
    std::mt19937_64 random(seed);
    const std::string alphabet = "ab-0129 =slots\n\t#@:,.$;'\"\\\r=@:,0-";
    const std::string pieces[] = {"a slots=4\n", "w2:", "w1", "0-3", "@", "slots=", "\n", "A=", "#"};
    const auto text = [&] {
        std::string made;
        for (size_t i = random() % 24; i > 0; --i) {
            const auto kind = random() % 4;
            if (kind == 0) made += static_cast<char>(random());
            if (kind == 1) made += alphabet[random() % alphabet.size()];
            if (kind >= 2) made += pieces[random() % std::size(pieces)];
        }
        return made;
    };
    const auto survives = [&](const std::function<void()>& call, const std::string& input) {
        try {
            call();
            return 1;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::invalid_argument) << error.what() << "\n" << input;
            return 0;
        }
    };
    int accepted[4] = {};
    for (int i = 0; i < 20000; ++i) {
        const std::string input = text();
        accepted[0] += survives(
            [&] {
                for (const HostSlots& host : parse_hostfile(input, "F")) {
                    EXPECT_EQ(why_no_host_name(host.host), "");
                    EXPECT_TRUE(host.slots >= 0 && host.slots <= max_slots);
                }
            },
            input);
        accepted[1] += survives(
            [&] {
                for (const HostSelection& host : chosen({input, ""})) {
                    EXPECT_FALSE(host.slots.empty());
                    EXPECT_TRUE(std::ranges::is_sorted(host.slots));
                    EXPECT_LT(host.slots.back(), host.host == "w2" ? 4 : 2);
                }
            },
            input);
        accepted[2] += survives([&] { (void)parse_environment_file(input, "F"); }, input);
        accepted[3] += survives([&] { (void)parse_processors(input); }, input);
    }
    for (const int count : accepted) EXPECT_GT(count, 0);
}

}  // namespace
}  // namespace tsr
