// One agent for each host of a job, on loopback: TESSERA_HOST_ID makes this machine several hosts. tests/netns has the
// same on networks that can be cut.
#include <algorithm>
#include <filesystem>
#include <utility>

#include "comm/host.hpp"
#include "launch/node_link.hpp"
#include "launch/node_message.hpp"
#include "store/address.hpp"
#include "store/handshake.hpp"
#include "store/tcp_store.hpp"

#include "launch/agents.hpp"
#include "launch/coordinator.hpp"

namespace tsr {
namespace {

using testing::Agents;
using ::testing::AllOf;
using testing::Child;
using ::testing::Contains;
using ::testing::HasSubstr;
using testing::lines_of;
using ::testing::Not;

const std::vector<std::string> two_hosts = {"--nnodes", "2", "-n", "2"};

std::vector<std::string> with(std::vector<std::string> options, const std::vector<std::string>& more) {
    options.insert(options.end(), more.begin(), more.end());
    return options;
}

TEST_F(Agents, RanksOfTwoHostsAreOneJob) {
    Child a = start_on("a", two_hosts, {meets_});
    Child b = start_on("b", two_hosts, {meets_});
    EXPECT_EQ(a.wait(), 0) << said("a");
    EXPECT_EQ(b.wait(), 0) << said("b");
    const std::string both = said("a") + said("b");
    for (int rank = 0; rank < 4; ++rank) {
        EXPECT_THAT(both,
                    HasSubstr(fmt::format("[rank {0} meets] rank {0} of 4, local {1} of 2, host {2} of 2, epoch 0\n",
                                          rank, rank % 2, rank / 2)));
    }
    const std::vector<std::string> lines = lines_of(both);
    EXPECT_EQ(std::ranges::count_if(lines, [](const std::string& line) { return line.starts_with("[rank "); }), 4);
    EXPECT_EQ(leftover_directories(), 0);
}

TEST_F(Agents, NodeRanksAreHonouredWhoeverOwnsTheEndpoint) {
    const std::vector<std::string> command = {"/bin/sh", "-c", "echo $HOST $RANK $GROUP_RANK $MASTER_PORT > $D/$HOST"};
    Child b = start_on("b", {"--nnodes=2", "--node-rank=1"}, command);
    await_said("b", "waiting for more hosts: 1 of 2 hosts have joined");
    Child a = start_on("a", {"--nnodes=2", "--node_rank", "0"}, command);
    EXPECT_EQ(a.wait(), 0) << said("a");
    EXPECT_EQ(b.wait(), 0) << said("b");
    EXPECT_THAT(file("a"), HasSubstr("a 0 0 "));
    EXPECT_EQ(file("b").substr(6), file("a").substr(6)) << "they have one MASTER_PORT";
    EXPECT_THAT(file("b"), HasSubstr("b 1 1 "));
}

TEST_F(Agents, AKilledRankRestartsAllAndTheRestartCountsOnce) {
    const auto options = with(two_hosts, {"--max-restarts", "1"});
    Child a = start_on("a", options, {meets_, "on"});
    Child b = start_on("b", options, {meets_, "on"});
    const std::vector<pid_t> first = await_met(0, 4);
    ::kill(first[3], SIGKILL);
    const std::vector<pid_t> second = await_met(1, 4);
    for (const pid_t pid : first) expect_dies(pid);
    EXPECT_THAT(said("a"), HasSubstr("rank 3 was killed by SIGKILL"));
    EXPECT_THAT(said("b"), HasSubstr("starting round 1 with 4 ranks, restart 1 of 1"));
    ::kill(second[0], SIGKILL);
    EXPECT_EQ(a.wait(), 128 + SIGKILL) << said("a");
    EXPECT_EQ(b.wait(), 128 + SIGKILL) << said("b");
    const std::string both = said("a") + said("b");
    EXPECT_THAT(both, AllOf(HasSubstr("the job failed: rank 0 was killed by SIGKILL"),
                            HasSubstr(fmt::format("root cause: rank 0 (pid {} on ", second[0])),
                            HasSubstr("1 of 1 restarts used (--max-restarts)"), HasSubstr(" prints the report")));
}

TEST_F(Agents, AFailureIsReportedOnceWithItsHostAndItsCodeIsEveryAgents) {
    const std::vector<std::string> command = {"/bin/sh", "-c",
                                              "echo $$ > $D/rank$RANK; [ $RANK = 1 ] || exec sleep 600;"
                                              "until [ -s $D/rank0 ]; do :; done; echo it broke >&2; exit 9"};
    Child a = start_on("a", {"--nnodes", "2", "--node-rank", "0"}, command);
    await_said("a", "waiting for more hosts");
    Child b = start_on("b", {"--nnodes", "2", "--node-rank", "1"}, command);
    EXPECT_EQ(a.wait(), 9);
    EXPECT_EQ(b.wait(), 9);
    expect_dies(pid_in("rank0"));
    EXPECT_THAT(said("a"), AllOf(HasSubstr("the job failed: rank 1 ended with exit code 9: last stderr line: it broke"),
                                 HasSubstr("root cause: rank 1 (pid ")));
    EXPECT_THAT(said("b"), AllOf(HasSubstr("[rank 1 sh] it broke\n"),
                                 HasSubstr("the job failed: rank 1 ended with exit code 9 (pid "),
                                 HasSubstr("prints the report"), Not(HasSubstr("root cause"))));
}

TEST_F(Agents, AKilledAgentIsLostAndItsRanksDie) {
    Child a = start_on("a", two_hosts, {meets_, "on"});
    await_said("a", "waiting for more hosts");
    Child b = start_on("b", two_hosts, {meets_, "on"});
    const std::vector<pid_t> pids = await_met(0, 4);
    ::kill(child_of(b.pid()), SIGKILL);
    EXPECT_EQ(a.wait(), 1) << said("a");
    EXPECT_NE(b.wait(), 0);
    for (const pid_t pid : pids) expect_dies(pid);
    EXPECT_THAT(said("a"), AllOf(HasSubstr("was lost with its host"), HasSubstr("its agent has ended"),
                                 HasSubstr("1 host left, fewer than 2 (--nnodes)")));
}

TEST_F(Agents, TheOthersEndWhenTheCoordinatingAgentIsKilled) {
    const std::vector<std::string> three_hosts = {"--nnodes", "3", "-n", "2"};
    Child a = start_on("a", three_hosts, {meets_, "on"});
    await_said("a", "waiting for more hosts");
    Child b = start_on("b", three_hosts, {meets_, "on"});
    Child c = start_on("c", three_hosts, {meets_, "on"});
    const std::vector<pid_t> pids = await_met(0, 6);
    ::kill(child_of(a.pid()), SIGKILL);
    EXPECT_EQ(b.wait(), 1) << said("b");
    EXPECT_EQ(c.wait(), 1) << said("c");
    for (const pid_t pid : pids) expect_dies(pid);
    for (const char* host : {"b", "c"}) {
        EXPECT_THAT(said(host), HasSubstr(fmt::format("lost the coordinating agent on host {} at tcp://127.0.0.1:{}: "
                                                      "its agent has ended; the ranks of this host were ended",
                                                      host_name(), port_)));
    }
}

TEST_F(Agents, ASpareTakesOverAndTheOldHostComesBackWithoutAVote) {
    const std::string spares = fmt::format("127.0.0.1:{},127.0.0.1:{}", testing::free_port(), testing::free_port());
    const std::vector<std::string> options = {"--nnodes",      "2:3",  "-n",        "2",
                                              "--store-hosts", spares, "--grace-s", "0.2"};
    Child a = start_on("a", options, {meets_, "on"});
    await_said("a", "more than half of the 3 store hosts are needed (--store-hosts)");
    Child b = start_on("b", options, {meets_, "on"});
    Child c = start_on("c", options, {meets_, "on"});
    const std::vector<pid_t> first = await_met(0, 6);
    ::kill(child_of(a.pid()), SIGKILL);
    EXPECT_NE(a.wait(), 0);
    (void)await_met(Coordinator::first_round(1), 4);
    for (const pid_t pid : first) expect_dies(pid);
    for (const char* host : {"b", "c"}) {
        EXPECT_THAT(said(host),
                    AllOf(HasSubstr("lost the coordinating agent on host "), HasSubstr("its agent has ended")));
    }
    EXPECT_THAT(said("b") + said("c"), HasSubstr("coordinates the job from now on, term 1"));
    Child again = start_on("again", options, {meets_, "on"});
    (void)await_met(Coordinator::first_round(1) + 1, 6);
    let_go();
    EXPECT_EQ(b.wait(), 0) << said("b");
    EXPECT_EQ(c.wait(), 0) << said("c");
    EXPECT_EQ(again.wait(), 0) << said("again");
}

TEST_F(Agents, WithoutMostStoreHostsTheJobEndsInItsDeadline) {
    const std::string spares = fmt::format("127.0.0.1:{},127.0.0.1:{}", testing::free_port(), testing::free_port());
    const std::vector<std::string> options = {"--nnodes", "1:3", "--store-hosts", spares};
    Child a = start_on("a", options, {meets_, "on"});
    await_said("a", "more than half of the 3 store hosts are needed");
    Child b = start_on("b", options, {meets_, "on"});
    Child c = start_on("c", with(options, {"--rdzv-conf", "join_timeout=3"}), {meets_, "on"});
    const std::vector<pid_t> pids = await_met(0, 3);
    ::kill(child_of(a.pid()), SIGKILL);
    ::kill(child_of(b.pid()), SIGKILL);
    EXPECT_EQ(c.wait(), 1) << said("c");
    for (const pid_t pid : pids) expect_dies(pid);
    EXPECT_THAT(said("c"), AllOf(HasSubstr("found no agent that coordinates the job within 3 s"),
                                 HasSubstr("more than half of the 3 store hosts are needed (--store-hosts)")));
}

TEST_F(Agents, AJobShrinksWithAHostAndGrowsWithALateOne) {
    const std::vector<std::string> options = {"--nnodes",  "1:2", "-n", "2", "--rdzv-conf", "last_call_timeout=0.1",
                                              "--grace-s", "0.2"};
    Child a = start_on("a", options, {meets_, "on"});
    (void)await_met(0, 2);
    Child b = start_on("b", options, {meets_, "on"});
    (void)await_met(1, 4);
    EXPECT_THAT(said("a"),
                AllOf(HasSubstr("a host has joined"),
                      HasSubstr("the hosts of the job have changed; starting round 1 with 4 ranks on 2 hosts")));
    ::kill(b.pid(), SIGKILL);  // the guardian
    const auto last = await_met(2, 2);
    EXPECT_THAT(said("a"), HasSubstr("starting round 2 with 2 ranks on 1 host"));
    let_go();
    EXPECT_EQ(a.wait(), 0) << said("a");
}

TEST_F(Agents, ASignalToAnyAgentStopsTheJobEverywhere) {
    Child a = start_on("a", two_hosts, {meets_, "on"});
    await_said("a", "waiting for more hosts");
    Child b = start_on("b", two_hosts, {meets_, "on"});
    const std::vector<pid_t> pids = await_met(0, 4);
    ::kill(b.pid(), SIGTERM);
    await_said("a", "SIGTERM: no rank polls for preemption");
    EXPECT_THAT(said("a"), HasSubstr("asks the job to stop"));
    ::kill(a.pid(), SIGTERM);
    EXPECT_EQ(a.wait(), 128 + SIGTERM) << said("a");
    EXPECT_EQ(b.wait(), 128 + SIGTERM) << said("b");
    for (const pid_t pid : pids) expect_dies(pid);
}

TEST_F(Agents, AHostThatCannotBelongToTheJobIsTold) {
    const auto differs = [&](std::vector<std::string> options, const std::vector<std::string>& command,
                             const std::string& part) {
        port_ = testing::free_port();
        std::filesystem::remove(output_of("a"));
        Child a = start_on("a", {"--nnodes", "3", "--node-rank", "0"}, {"/bin/true"});
        await_said("a", "waiting for more hosts");
        Child b = start_on("b", std::move(options), command);
        EXPECT_EQ(b.wait(), 1) << part;
        EXPECT_EQ(a.wait(), 1) << part;
        EXPECT_THAT(said("a"), HasSubstr(part));
        EXPECT_THAT(said("b"), HasSubstr("this host cannot join the job: "));
        EXPECT_THAT(said("b"), HasSubstr(part));
    };
    differs({"--nnodes", "3", "--node-rank", "0"}, {"/bin/true"}, "--node-rank 0 is given on two hosts: ");
    differs({"--nnodes", "3"}, {"/bin/true"}, " has --node-rank 0, but host ");
    differs({"--nnodes", "3", "--node-rank", "1"}, {"/bin/echo", "x"}, " has the command `/bin/echo x`, but host ");
    differs({"--nnodes", "3:4", "--node-rank", "1"}, {"/bin/true"}, " has --nnodes 3:4, but host ");
}

TEST_F(Agents, AnAgentMayHaveRanksOfSomePrograms) {
    const auto start_each = [&](const std::string& of_a, const std::string& of_b) {
        const std::vector<std::string> options = {"--nnodes", "2"};
        const auto programs = [&](const std::string& first, const std::string& second) {
            return std::vector<std::string>{"-n", first, meets_, ":", "-n", second, "--role", "b", meets_};
        };
        Child a = start_on("a", with(options, {"--node-rank", "0"}), programs(of_a, "0"));
        Child b = start_on("b", with(options, {"--node-rank", "1"}), programs("0", of_b));
        return std::pair(a.wait(), b.wait());
    };
    EXPECT_EQ(start_each("1", "2"), std::pair(0, 0)) << said("a") << said("b");
    EXPECT_THAT(said("a"), HasSubstr("[rank 0 meets] rank 0 of 3, local 0 of 1, host 0 of 2"));
    EXPECT_THAT(said("b"), HasSubstr("[rank 2 meets] rank 2 of 3, local 1 of 2, host 1 of 2"));
    // The same command on every host, which says itself what runs there.
    const std::vector<std::string> placed = {"-n", "1@x", meets_, ":", "-n", "2@y", meets_};
    Child x = start_on("x", {"--nnodes", "2", "--node-rank", "0"}, placed);
    Child y = start_on("y", {"--nnodes", "2", "--node-rank", "1"}, placed);
    EXPECT_EQ(x.wait(), 0) << said("x");
    EXPECT_EQ(y.wait(), 0) << said("y");
    EXPECT_THAT(said("y"), HasSubstr("[rank 2 meets] rank 2 of 3, local 1 of 2, host 1 of 2"));
    EXPECT_THAT(said("x"), Not(HasSubstr("[rank 1")));
}

TEST_F(Agents, AProgramThatNoHostRunsEndsTheJobOnAll) {
    const std::vector<std::string> command = {"-n", "1", "/bin/true", ":", "-n", "0", "no-such-program", "x"};
    Child a = start_on("a", {"--nnodes", "2"}, command);
    Child b = start_on("b", {"--nnodes", "2"}, command);
    EXPECT_EQ(a.wait(), 1);
    EXPECT_EQ(b.wait(), 1);
    for (const char* host : {"a", "b"}) {
        EXPECT_THAT(said(host), HasSubstr("all hosts have joined, but no host runs `no-such-program x`"));
    }
}

// The agent of the other host is this test.
TEST_F(Agents, RanksGetSigtermAndTimeWhenTheAgentOfAnotherHostFails) {
    const std::vector<std::string> command = {
        "/bin/sh", "-c",
        "trap 'until [ -e $D/go ]; do :; done; echo saved > $D/saved; exit 0' TERM; echo $$ > $D/rank; "
        "while :; do :; done"};
    Child a =
        start_on("a", {"--nnodes", "2", "--kill-grace-s", "60", "--rdzv-conf", "keep_alive_interval=60"}, command);
    await_said("a", "waiting for more hosts");
    StoreOptions options;
    options.token = std::string(64, 'a');
    options.job_id = "agents of none";
    NodeLink link(
        connect_with_handshake({"127.0.0.1", port_}, handshake::Party::of(options, true, ""), testing::soon()));
    Hello hello;
    hello.agent = "b";
    hello.host = "h";
    hello.version = TESSERA_VERSION;
    hello.ranks = {1};
    hello.agreed = {"--nnodes 2:2",
                    "--max-restarts 0",
                    "--min-ranks 0",
                    "--on-loss restart",
                    fmt::format("the command `{}`", fmt::join(command, " ")),
                    "--role default"};
    link.send(encode(Report(hello)));
    const auto await = [&](const std::function<bool(const Order&)>& is_it) {
        wait_until(
            [&] {
                link.write_some();
                bool found = false;
                for (const Json& message : link.receive()) found = is_it(decode_order(message)) || found;
                return found || link.ended();
            },
            testing::soon(), "an order");
        ASSERT_FALSE(link.ended()) << link.why() << said("a");
    };
    await([](const Order& order) { return std::holds_alternative<StartRound>(order); });
    const pid_t rank = pid_in("rank");
    link.send(encode(Report(NodeFailed{"its disk is full", 5})));
    link.write_all(testing::soon());
    await_said("a", "host h failed: its disk is full");
    link.end("it has heard of the end");
    EXPECT_TRUE(testing::alive(rank));
    let_go();
    EXPECT_EQ(a.wait(), 5) << said("a");
    EXPECT_EQ(file("saved"), "saved\n") << said("a");
}

TEST_F(Agents, AnEndpointThatCannotBeUsedIsNamedWithThisHost) {
    struct Case {
        const char* name;
        std::string endpoint;
        std::vector<std::string> options;
        int code;
        std::vector<std::string> parts;
    };
    Address taken{"127.0.0.1", 0};
    const Fd other = listen_on(taken);  // it accepts nobody
    const std::string in_use = fmt::format("127.0.0.1:{}", taken.port);
    const std::string host = "host " + host_name();
    const Case table[] = {
        {"unknown",
         "no-such-host.invalid:29400",
         {"--rdzv-conf", "join_timeout=0.3"},
         1,
         {host + " found no agent of the job at tcp://no-such-host.invalid:29400 within 0.3 s",
          "cannot resolve host name 'no-such-host.invalid'"}},
        {"in-use",
         in_use,
         {"--rdzv-conf", "join_timeout=0.3"},
         1,
         {host + " found no agent of the job at tcp://" + in_use + " within 0.3 s", "start `tessera run` on the host"}},
        {"own",
         in_use,
         {"--rdzv-conf", "is_host=1,join_timeout=0.3"},
         1,
         {host, "is to own the endpoint (is_host)", "tcp://" + in_use}},
        {"nobody",
         "127.0.0.1:" + std::to_string(port_),
         {"--rdzv-conf", "is_host=0,join_timeout=0.3"},
         1,
         {host + " found no agent of the job at tcp://127.0.0.1:", "Connection refused"}},
    };
    for (const Case& c : table) {
        endpoint_ = c.endpoint;
        std::vector<std::string> options = with({"--nnodes", "2"}, c.options);
        Child agent = start_on(c.name, options, {"/bin/true"});
        EXPECT_EQ(agent.wait(), c.code) << c.name << said(c.name);
        for (const std::string& part : c.parts) EXPECT_THAT(said(c.name), HasSubstr(part)) << c.name;
    }
    endpoint_ = "198.51.100.1:29400";
    Child stranger = start_on("no-token", {"--nnodes", "2"}, {"/bin/true"}, {}, "");
    EXPECT_EQ(stranger.wait(), 126);
    EXPECT_THAT(said("no-token"), HasSubstr("no job token for the store at tcp://198.51.100.1:29400; give all ranks "
                                            "the same TESSERA_TOKEN_FILE"));
}

TEST_F(Agents, AWrongTokenIsRefusedAndNobodyElseIsDisturbed) {
    const std::vector<std::string> options = {"--nnodes", "2"};
    Child a = start_on("a", options, {"/bin/true"});
    await_said("a", "waiting for more hosts");
    Child stranger = start_on("s", options, {"/bin/true"}, {}, std::string(64, 'b'));
    EXPECT_EQ(stranger.wait(), 126) << said("s");
    EXPECT_THAT(said("s"), AllOf(HasSubstr("cannot join the job"), HasSubstr("job token")));
    Child b = start_on("b", options, {"/bin/true"});
    EXPECT_EQ(b.wait(), 0) << said("b");
    EXPECT_EQ(a.wait(), 0) << said("a");
}

TEST_F(Agents, HostsThatDoNotComeAreNamed) {
    Child a = start_on("a", {"--nnodes", "2", "--node-rank", "1", "--rdzv-conf", "join_timeout=0.3"}, {"/bin/true"});
    EXPECT_EQ(a.wait(), 1);
    EXPECT_THAT(said("a"), AllOf(HasSubstr("after 0.3 s, 1 of 2 hosts have joined: "),
                                 HasSubstr(" (node rank 1); missing: node rank 0")));
    endpoint_ = "127.0.0.1:" + std::to_string(port_);
    Child b = start_on("b", {"--nnodes", "2", "--rdzv-conf", "join_timeout=0.3,is_host=false"}, {"/bin/true"});
    EXPECT_EQ(b.wait(), 1);
    EXPECT_THAT(said("b"),
                AllOf(HasSubstr("found no agent of the job at tcp://127.0.0.1:"), HasSubstr("within 0.3 s")));
}

}  // namespace
}  // namespace tsr
