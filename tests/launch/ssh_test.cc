// Starting an agent through ssh: the command line, the order, and the process that reads it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "base/error.hpp"
#include "comm/host.hpp"
#include "launch/front.hpp"
#include "launch/hosts/ssh.hpp"
#include "run_fixture.hpp"

namespace tsr {
namespace {

using testing::Child;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::lines_of;
using testing::Result;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

const AgentOrder order{"/tmp", {{"A", "$(id) `id` ' \" \n;"}}, {"run", "-n", "2", "/bin/sh", "-c", "x y;z"}};

std::string message_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    return "nothing was refused";
}

TEST(Ssh, ArgumentsAreFixedWords) {
    const SshStart start = ssh_start("worker-1", 2222, "/opt/tessera/bin/tessera", order);
    EXPECT_THAT(start.command, ElementsAre("ssh", "-T", "-o", "BatchMode=yes", "-p", "2222", "--", "worker-1",
                                           "/opt/tessera/bin/tessera agent-from-stdin"));
    EXPECT_THAT(ssh_start("worker-1", {}, "/t", {}).command,
                ElementsAre("ssh", "-T", "-o", "BatchMode=yes", "--", "worker-1", "/t agent-from-stdin"));
    const size_t end = start.input.find('\n');
    const std::string json = start.input.substr(end + 1);
    EXPECT_EQ(order_length(start.input.substr(0, end)), json.size());
    EXPECT_EQ(decode_order(json), order);
}

TEST(Ssh, Messages) {
    for (const char* host : {"-oProxyCommand=id", "a;id", "a b", "$(id)", "a\nb", ""}) {
        EXPECT_THAT(message_of([&] { (void)ssh_start(host, {}, "/t", {}); }), HasSubstr("host '")) << host;
    }
    for (const char* path : {"tessera", "/a b", "/a;id", "/$(id)", "/a'b", ""}) {
        EXPECT_THAT(message_of([&] { (void)ssh_start("a", {}, path, {}); }),
                    HasSubstr("cannot be started through ssh"));
    }
    EXPECT_THAT(message_of([] { (void)ssh_start("a", 70000, "/t", {}); }), HasSubstr("--ssh_port 70000"));
    EXPECT_THAT(message_of([] { (void)encode({"/", {{"A", "\xff"}}, {}}); }), HasSubstr("is not UTF-8"));
    EXPECT_THAT(message_of([] { (void)encode({"/", {}, {std::string("a\0b", 3)}}); }), HasSubstr("has a NUL byte"));
    for (const char* line : {"", "tessera-order-1", "tessera-order-1 x", "tessera-order-1 -1", "tessera-order-2 5",
                             "tessera-order-1 99999999999999999999", "tessera-order-1 16777217", "Welcome!"}) {
        EXPECT_THAT(message_of([&] { (void)order_length(line); }), HasSubstr("does not begin an order")) << line;
    }
    EXPECT_THAT(message_of([] { (void)decode_order("{}"); }), HasSubstr("directory"));
}

TEST(Ssh, SignalsAreLines) {
    EXPECT_EQ(signal_line(SIGTERM), "signal 15\n");
    EXPECT_EQ(signal_in("signal 15"), SIGTERM);
    for (const char* line :
         {"", "signal", "signal ", "signal 0", "signal -1", "signal 1x", "signal 99999999999", "x 15"}) {
        EXPECT_EQ(signal_in(line), 0) << line;
    }
}

// `tessera run` over several hosts, with a program in the place of ssh that runs the other agents on this host.
class SshJob : public testing::Run {
   protected:
    SshJob() {
        std::filesystem::create_directory(path("bin"));
        std::ofstream(path("bin/ssh")) << "#!/bin/sh\necho \"$*\" >> $D/ssh\nwhile [ $1 != -- ]; do shift; done\n"
                                          "[ $2 != far ] || exit 255\nTESSERA_HOST_ID=$2 exec /bin/sh -c \"$3\"\n";
        std::filesystem::permissions(path("bin/ssh"), std::filesystem::perms::owner_all);
        ::setenv("PATH", (path("bin") + ":" + path_).c_str(), 1);
    }
    ~SshJob() override { ::setenv("PATH", path_.c_str(), 1); }

    [[nodiscard]] std::string path(const std::string& name) const { return (directory_.path() / name).string(); }
    // With ranks on this host and on these.
    std::vector<std::string> on(const std::vector<std::string>& hosts, const std::vector<std::string>& words) const {
        std::ofstream list(path("hosts"));
        list << "localhost slots=2\n";
        for (const std::string& host : hosts) list << host << " slots=2\n";
        std::vector<std::string> all{"--hostfile", path("hosts"), "--master-addr", "127.0.0.1"};
        all.insert(all.end(), words.begin(), words.end());
        return all;
    }

    const std::string path_ = std::getenv("PATH");
    const std::string meets_ = testing::binary_dir() + "/tests/meets";
};

TEST_F(SshJob, RanksOfAllHostsAreOneJob) {
    const Result result = run(on({"worker-1", "worker-2"}, {"--no-prefix", meets_}));
    EXPECT_EQ(result.code, 0) << result.err;
    std::vector<std::string> expected;
    for (int rank = 0; rank < 6; ++rank) {
        expected.push_back(fmt::format("rank {} of 6, local {} of 2, host {} of 3, epoch 0", rank, rank % 2, rank / 2));
    }
    EXPECT_THAT(lines_of(result.out), UnorderedElementsAreArray(expected));
    EXPECT_THAT(
        lines_of(file("ssh")),
        UnorderedElementsAre(fmt::format("-T -o BatchMode=yes -- worker-1 {} agent-from-stdin", testing::tessera),
                             fmt::format("-T -o BatchMode=yes -- worker-2 {} agent-from-stdin", testing::tessera)));
}

TEST_F(SshJob, ArgumentsAndVariablesReachEveryHostAsTheyAre) {
    ::setenv("NCCL_TEST", "$(touch pwned); 'x'", 1);
    const Result result = run(on({"worker-1"}, {"--no-prefix", "--env", "K=a b", "/bin/sh", "-c",
                                                "echo \"$K|$NCCL_TEST|$1|$PWD\"", "sh", "`id` $(id) \"\n"}));
    ::unsetenv("NCCL_TEST");
    EXPECT_EQ(result.code, 0) << result.err;
    const std::string line =
        "a b|$(touch pwned); 'x'|`id` $(id) \"\n|" + std::filesystem::current_path().string() + "\n";
    EXPECT_EQ(result.out, line + line + line + line);
}

// A C program on this host and a script on another; the second round has the same places.
TEST_F(SshJob, ProgramsRunOnTheHostsThatAreNamedForThem) {
    std::ofstream(path("b.py")) << R"(import os, signal, sys
k = os.environ
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "K"]
print("b", *(k[name] for name in names), *sys.argv[1:])
if k["TESSERA_EPOCH"] == "0":
    open(k["D"] + "/at" + k["RANK"], "w")
    if k["RANK"] != "4":
        signal.pause()
    while not all(os.path.exists(k["D"] + "/at" + str(rank)) for rank in range(4)):
        pass
    sys.exit(3)
)";
    const Result result =
        run({"--master-addr",
             "127.0.0.1",
             "--no-prefix",
             "--max-restarts",
             "1",
             "-n",
             "2@localhost",
             "--role",
             "trains",
             "/bin/sh",
             "-c",
             "echo a $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $ROLE_NAME $ROLE_RANK "
             "$ROLE_WORLD_SIZE; [ $TESSERA_EPOCH = 1 ] || { : > $D/at$RANK; exec sleep 600; }",
             ":",
             "-n",
             "3@worker-1",
             "--role",
             "reads",
             "--env",
             "K=$(id)",
             path("b.py"),
             "a b"});
    EXPECT_EQ(result.code, 0) << result.err;
    std::vector<std::string> expected;
    for (int round = 0; round < 2; ++round) {
        for (int i = 0; i < 2; ++i) expected.push_back(fmt::format("a {0} 5 {0} 2 0 trains {0} 2", i));
        for (int i = 0; i < 3; ++i) expected.push_back(fmt::format("b {} 5 {} 3 1 reads {} 3 $(id) a b", i + 2, i, i));
    }
    EXPECT_THAT(lines_of(result.out), UnorderedElementsAreArray(expected));
    EXPECT_THAT(result.err, HasSubstr("starting round 1 with 5 ranks, restart 1 of 1"));
    // Ranks of both meet; a host that is alone and elsewhere is started through ssh, too.
    EXPECT_EQ(run({"--master-addr", "127.0.0.1", "-n", "1@localhost", meets_, ":", "-n", "2@worker-1", meets_}).code,
              0);
    const Result alone = run({"--no-prefix", "-n", "2@worker-2", meets_});
    EXPECT_EQ(alone.code, 0) << alone.err;
    EXPECT_THAT(alone.out, HasSubstr("rank 1 of 2, local 1 of 2, host 0 of 1"));
    EXPECT_THAT(file("ssh"), HasSubstr("-- worker-2 "));
}

TEST_F(SshJob, PlacesThatCannotBeAreNamed) {
    const std::string here = host_name();
    const std::pair<std::vector<std::string>, std::string> table[] = {
        {{"-n", "1@localhost", "true", ":", "-n", "1@" + here, "true"},
         fmt::format("hosts 'localhost' and '{}' are both this host; name it once", here)},
        {{"-n", "1@localhost", "true", ":", "-n", "0@b", "true"}, "0 ranks of 'true' are requested"},
        {{"-n", "1@localhost", "true", ":", "-n", "cpu@b", "true"}, "-n cpu@b: another host's cores"},
        {{"-n", "gpu@b", "true"}, "-n gpu@b: another host's cores"},
        {{"-n", "1@localhost", "true", ":", "-n", "1000000000@b", "true"}, "1000000000 ranks of 'true'"},
        {{"-n", "1@localhost", "true", ":", "-n", "1@-b", "true"}, "host '-b' begins with '-'"},
        {{"-n", "1@localhost", "true", ":", "-n", "1@b;id", "true"}, "host 'b;id' is not a host name"},
        {{"-n", "1@localhost", "true", ":", "-n", "1@b", "--node-rank", "1", "true"}, "--node-rank"},
        {{"--nnodes", "3", "--rdzv-endpoint", "a", "-n", "1@a", "true", ":", "-n", "1@b", "true"},
         "--nnodes 3: -n N@HOST names 2 hosts (a, b)"},
        {{"--nnodes", "2", "--rdzv-endpoint", "a", "-n", "1@a", "true", ":", "-n", "1@b", "true"},
         fmt::format("this host is {}, but -n N@HOST names a, b", here)},
        {{"--nnodes", "2", "--rdzv-endpoint", "a", "-n", "0", "true", ":", "-n", "0", "true"},
         "this host would have no rank"},
        {{"--rdzv-id", "x", "-n", "1@b", "true"}, "this command starts the hosts of the job"},
    };
    for (const auto& [words, message] : table) {
        const Result result = run(words);
        EXPECT_EQ(result.code, 2) << message;
        EXPECT_THAT(result.err, HasSubstr(message));
    }
    const Result far = run({"--master-addr", "127.0.0.1", "-n", "1@localhost", meets_, ":", "-n", "1@far", meets_});
    EXPECT_EQ(far.code, 255);
    EXPECT_THAT(far.err, HasSubstr("the agent on host far ended with exit code 255"));
}

TEST_F(SshJob, TheExitCodeIsThatOfTheRankThatFailed) {
    const Result result = run(on({"worker-1"}, {"/bin/sh", "-c", "[ $RANK = 3 ] && exit 9; exec sleep 600"}));
    EXPECT_EQ(result.code, 9);
    EXPECT_THAT(result.err, HasSubstr("the job failed: rank 3 ended with exit code 9"));
}

TEST_F(SshJob, AHostThatCannotBeReachedEndsTheJobAndIsNamed) {
    const Result result = run(on({"worker-1", "far"}, {meets_}));
    EXPECT_EQ(result.code, 255);
    EXPECT_THAT(result.err,
                HasSubstr("the agent on host far ended with exit code 255, as ssh does if it cannot connect"));
}

TEST_F(SshJob, ASignalStopsTheJobOnAllHosts) {
    Child child =
        start(on({"worker-1"}, {"--grace-s", "0.1", "/bin/sh", "-c", "echo $$ > $D/rank$RANK; exec sleep 600"}));
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < 4; ++rank) ranks.push_back(pid_in(fmt::format("rank{}", rank)));
    ::kill(child.pid(), SIGTERM);
    const Result result = finish(child);
    EXPECT_EQ(result.code, 128 + SIGTERM) << result.err;
    EXPECT_THAT(result.err, HasSubstr("asks the job to stop"));
    for (const pid_t rank : ranks) expect_dies(rank);
}

TEST_F(SshJob, WhatIsBehindAnSshThatEndsStops) {
    const AgentOrder given{
        path("d"),
        {{"TOLD", "$(id)"}},
        {"run", "--grace-s", "0.1", "/bin/sh", "-c", "echo \"$TOLD\"; echo $$ > rank; exec sleep 600"}};
    std::ofstream(path("in"), std::ios::binary) << ssh_start("a", {}, "/t", given).input;
    const std::string command =
        fmt::format("(cat {0}/in; until [ -s {0}/d/rank ]; do :; done) | {1} agent-from-stdin > {0}/out 2>&1",
                    directory_.path().string(), testing::tessera);
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 128 + SIGTERM);
    expect_dies(pid_in("rank"));
    EXPECT_THAT(testing::read_file(path("out")), HasSubstr("[rank 0 sh] $(id)\n"));
}

TEST_F(SshJob, DeepspeedStartsItsAgentsTheSameWay) {
    std::ofstream(path("rank"))
        << "#!/bin/sh\necho \"$LOCAL_RANK/$LOCAL_SIZE $RANK/$WORLD_SIZE $CROSS_RANK/$CROSS_SIZE "
           "$CUDA_VISIBLE_DEVICES|$*\"\n";
    std::filesystem::permissions(path("rank"), std::filesystem::perms::owner_all);
    std::ofstream(path("hosts")) << "localhost slots=2\nworker-1 slots=4\n";
    const std::string rank = path("rank");
    const auto deepspeed = [&](const std::string& words) {
        const std::string command =
            fmt::format("{} deepspeed -H {} -i localhost@worker-1:0,3 --master_addr 127.0.0.1 {} --no_python {} 'a b'",
                        testing::tessera, path("hosts"), words, rank);
        return command;
    };
    const auto plain = [](const std::string& out) {
        std::vector<std::string> lines = lines_of(out);
        for (std::string& line : lines) line.erase(0, line.find("] ") + 2);
        return lines;
    };
    const auto run = [&](const std::string& command) {
        const std::string at = directory_.path().string();
        const int status =
            std::system(fmt::format("{{ HOME={0} TMPDIR={0} D={1}; export HOME TMPDIR D; {2}; }} > {0}/out 2> {0}/err",
                                    at, scratch(), command)
                            .c_str());
        return Result{WEXITSTATUS(status), testing::read_file(path("out")), testing::read_file(path("err"))};
    };
    const std::vector<std::string> expected{"0/2 0/4 0/2 0,1|--local_rank=0 a b", "1/2 1/4 0/2 0,1|--local_rank=1 a b",
                                            "0/2 2/4 1/2 0,3|--local_rank=0 a b", "1/2 3/4 1/2 0,3|--local_rank=1 a b"};
    const Result through_ssh = run(deepspeed("--ssh_port 2222"));
    EXPECT_EQ(through_ssh.code, 0) << through_ssh.err;
    EXPECT_THAT(plain(through_ssh.out), UnorderedElementsAreArray(expected));
    EXPECT_THAT(file("ssh"), HasSubstr("-p 2222 -- worker-1 "));
    const std::string port = std::to_string(testing::free_port());
    const Result by_hand =
        run(fmt::format("export TESSERA_TOKEN={}; TESSERA_HOST_ID=b {} & {}; code=$?; wait $!; exit $code",
                        std::string(64, 'a'), deepspeed("--no_ssh --node_rank 1 --master_port " + port),
                        deepspeed("--no_ssh --node_rank 0 --master_port " + port)));
    EXPECT_EQ(by_hand.code, 0) << by_hand.err;
    EXPECT_THAT(plain(by_hand.out), UnorderedElementsAreArray(expected));
}

TEST_F(SshJob, Messages) {
    const std::pair<std::vector<std::string>, const char*> table[] = {
        {{"--rdzv-id", "x", "true"}, "this command starts the hosts of the job"},
        {{"--master-port", "0", "true"}, "--master-port '0'"},
        {{"-n", "2", "true"}, "write no -n"},
    };
    for (const auto& [words, message] : table) {
        const Result result = run(on({"worker-1"}, words));
        EXPECT_EQ(result.code, 2) << message;
        EXPECT_THAT(result.err, HasSubstr(message));
    }
    std::ofstream(path("hosts")) << "localhost slots=1\nworker-1 slots=1\n";
    EXPECT_THAT(run({"--hostfile", path("hosts"), "true"}).err,
                HasSubstr("give --master-addr this host's name or address"));
}

}  // namespace
}  // namespace tsr
