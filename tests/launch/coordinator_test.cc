// The job's decisions as a state machine: single cases, and a simulation with random failures.
#include "launch/coordinator.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "sampling.hpp"
#include "seed.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Node = Coordinator::Node;

RunOptions options_of(int least, int most, int ranks_of_a_host = 2) {
    RunOptions options;
    options.programs.push_back({.command = {"true"}, .ranks = ranks_of_a_host, .environment = {}});
    options.hosts = HostOptions{};
    options.hosts->min_nodes = least;
    options.hosts->max_nodes = most;
    options.hosts->join_timeout = milliseconds{1000};
    options.hosts->last_call = milliseconds{100};
    return options;
}

Hello hello_of(int number, int ranks, int node_rank = -1) {
    Hello hello;
    hello.agent = fmt::format("agent {}", number);
    hello.host = fmt::format("h{}", number);
    hello.address = fmt::format("10.0.0.{}", number);
    hello.node_rank = node_rank;
    hello.ranks = {ranks};
    hello.master_port = 1;
    return hello;
}

RankEnd end_of(const Seat& seat, int status, bool by_agent = false, int turn = 1) {
    RankEnd end;
    end.rank = seat.rank;
    end.host = "h";
    end.pid = 100 + seat.rank;
    end.wait_status = status;
    end.by_agent = by_agent;
    end.order = turn;
    return end;
}

// Takes the orders; remembers the last start of each node, and the end.
class Job {
   public:
    explicit Job(const RunOptions& options) : coordinator(options, "job", 0, now) { read(); }

    void join(Node node, const Hello& hello) {
        coordinator.take(node, hello, now);
        read();
    }
    void take(Node node, const Report& report) {
        coordinator.take(node, report, now);
        read();
    }
    void lose(Node node) {
        coordinator.lose(node, "silence", now);
        read();
    }
    void pass(milliseconds span) {
        now += span;
        coordinator.tick(now);
        read();
    }
    // All ranks of a node end like this, and the round is over there.
    void end_all(Node node, int status, bool by_agent) {
        const StartRound start = starts.at(node);
        for (const Seat& seat : start.seats) take(node, RankEnded{start.round, end_of(seat, status, by_agent)});
        over(node);
    }
    void over(Node node) {
        take(node, RoundOver{.round = starts.at(node).round, .cut_short = false, .master_port = 1});
    }

    Coordinator::Time now;
    Coordinator coordinator;
    std::map<Node, StartRound> starts;
    std::map<Node, Finish> finishes;
    std::map<Node, std::string> refusals;
    std::map<Node, std::vector<EndRanks>> ends;
    std::vector<std::pair<Node, int>> replaced;
    std::string said;

   private:
    void read() {
        for (const auto& [node, order] : coordinator.take_orders()) {
            if (const auto* start = std::get_if<StartRound>(&order)) starts[node] = *start;
            if (const auto* finish = std::get_if<Finish>(&order)) finishes[node] = *finish;
            if (const auto* refused = std::get_if<Refused>(&order)) refusals[node] = refused->why;
            if (const auto* end = std::get_if<EndRanks>(&order)) ends[node].push_back(*end);
            if (const auto* replace = std::get_if<ReplaceRank>(&order)) replaced.emplace_back(node, replace->rank);
            if (const auto* say = std::get_if<Say>(&order)) said += say->text + "\n";
        }
    }
};

TEST(Coordinator, RanksFollowTheOrderOfJoiningOrOfNodeRanks) {
    Job job(options_of(2, 2));
    job.join(0, hello_of(0, 2));
    EXPECT_TRUE(job.starts.empty());
    job.join(1, hello_of(1, 3));
    EXPECT_EQ(job.starts.at(0).seats, (std::vector<Seat>{{0, 0, 0, 0, 5}, {1, 0, 1, 1, 5}}));
    EXPECT_EQ(job.starts.at(1).seats, (std::vector<Seat>{{2, 0, 0, 2, 5}, {3, 0, 1, 3, 5}, {4, 0, 2, 4, 5}}));
    EXPECT_EQ(job.starts.at(1).world_size, 5);
    EXPECT_EQ(job.starts.at(1).group_rank, 1);
    EXPECT_EQ(job.starts.at(1).master_address, "10.0.0.0");
    Job given(options_of(2, 2));
    given.join(0, hello_of(0, 1, 1));
    given.join(1, hello_of(1, 1, 0));
    EXPECT_EQ(given.starts.at(0).group_rank, 1);
    EXPECT_EQ(given.starts.at(0).master_address, "10.0.0.1") << "rank 0's host";
}

TEST(Coordinator, RolesAreCountedOverAllHosts) {
    RunOptions options = options_of(2, 2);
    options.programs.resize(2, options.programs.front());
    options.programs[1].role = "reader";
    Job job(options);
    for (const int node : {0, 1}) {
        Hello hello = hello_of(node, 2);
        hello.ranks.push_back(1);
        job.join(node, hello);
    }
    EXPECT_EQ(job.starts.at(0).seats, (std::vector<Seat>{{0, 0, 0, 0, 4}, {1, 0, 1, 1, 4}, {2, 1, 0, 0, 2}}));
    EXPECT_EQ(job.starts.at(1).seats, (std::vector<Seat>{{3, 0, 0, 2, 4}, {4, 0, 1, 3, 4}, {5, 1, 0, 1, 2}}));
}

// An agent ends its ranks after a signal; those of another host see that first, and one of them even another's failure.
TEST(Coordinator, RanksThatFailBecauseASignalEndedOthersAreNoFailure) {
    const auto code_after = [](int first_code, int peer) {
        Job job(options_of(2, 2));
        job.join(0, hello_of(0, 2));
        job.join(1, hello_of(1, 2));
        job.take(0, StopAsked{SIGTERM});
        const StartRound here = job.starts.at(0);
        const StartRound there = job.starts.at(1);
        const auto failed = [&](const Seat& seat, int code, int because_of) {
            RankEnd end = end_of(seat, code << 8);
            end.error = RecordedError{"lost", "", 0, std::string(code_name(Code::peer_lost)), because_of};
            job.take(1, RankEnded{there.round, end});
        };
        failed(there.seats[1], first_code, peer);
        failed(there.seats[0], 3, 0);
        for (const Seat& seat : here.seats) job.take(0, RankEnded{here.round, end_of(seat, SIGTERM, true)});
        job.take(0, RoundOver{.round = here.round, .cut_short = true, .master_port = 1});
        job.over(1);
        return job.finishes.at(0).exit_code;
    };
    EXPECT_EQ(code_after(3, 2), 128 + SIGTERM);
    EXPECT_EQ(code_after(5, -1), 5) << "its own failure";
}

// --on-loss continue: the others went on without it, and the signal came later.
TEST(Coordinator, ALossThatWasSurvivedDoesNotDecideTheCodeAfterASignal) {
    RunOptions options = options_of(2, 2);
    options.on_loss = OnLoss::go_on;
    Job job(options);
    job.join(0, hello_of(0, 2));
    job.join(1, hello_of(1, 2));
    const StartRound here = job.starts.at(0);
    const StartRound there = job.starts.at(1);
    job.take(1, RankEnded{there.round, end_of(there.seats[1], SIGKILL)});
    job.take(0, StopAsked{SIGTERM});
    RankEnd victim = end_of(there.seats[0], 1 << 8, false, 2);
    victim.error = RecordedError{"lost", "", 0, std::string(code_name(Code::peer_lost)), 0};
    job.take(1, RankEnded{there.round, victim});
    for (const Seat& seat : here.seats) job.take(0, RankEnded{here.round, end_of(seat, SIGTERM, true, 3)});
    job.take(0, RoundOver{.round = here.round, .cut_short = true, .master_port = 1});
    job.over(1);
    EXPECT_EQ(job.finishes.at(0).exit_code, 128 + SIGTERM);
}

// The signal came while the other ranks were being ended.
TEST(Coordinator, AFailureBeforeASignalIsTheCause) {
    Job job(options_of(2, 2));
    job.join(0, hello_of(0, 1));
    job.join(1, hello_of(1, 1));
    RankEnd late = end_of({1, 0, 0}, 3 << 8);
    late.error = RecordedError{"late", "", 0, std::string(code_name(Code::timeout)), 0};
    job.take(1, RankEnded{0, late});
    job.over(1);
    job.take(0, StopAsked{SIGTERM});
    job.take(0, RankEnded{0, end_of({0, 0, 0}, SIGTERM, true, 2)});
    job.take(0, RoundOver{.round = 0, .cut_short = true, .master_port = 1});
    EXPECT_NE(job.finishes.at(0).exit_code, 128 + SIGTERM);
}

// Two programs, of which each host runs one.
RunOptions two_programs(int least, int most) {
    RunOptions options = options_of(least, most);
    options.programs.push_back({.command = {"b", "x"}, .ranks = 0, .environment = {}});
    return options;
}

Hello running(int number, std::vector<int> ranks) {
    Hello hello = hello_of(number, 0);
    hello.ranks = std::move(ranks);
    return hello;
}

TEST(Coordinator, AHostMayRunSomeOfTheProgramsAndARestartKeepsThem) {
    RunOptions options = two_programs(2, 2);
    options.programs[1].role = "reader";
    options.max_restarts = 1;
    Job job(options);
    job.join(0, running(0, {2, 0}));
    job.join(1, running(1, {0, 3}));
    const std::vector<Seat> a{{0, 0, 0, 0, 2}, {1, 0, 1, 1, 2}};
    const std::vector<Seat> b{{2, 1, 0, 0, 3}, {3, 1, 1, 1, 3}, {4, 1, 2, 2, 3}};
    for (int round = 0; round < 2; ++round) {
        EXPECT_EQ(job.starts.at(0).seats, a);
        EXPECT_EQ(job.starts.at(1).seats, b);
        EXPECT_EQ(job.starts.at(1).round, round);
        job.end_all(1, 1 << 8, false);
        job.end_all(0, 15, true);
    }
    EXPECT_EQ(job.finishes.at(0).exit_code, 1);
}

TEST(Coordinator, AProgramThatNoHostRunsIsNamed) {
    Job full(two_programs(2, 2));
    full.join(0, running(0, {2, 0}));
    full.join(1, running(1, {1, 0}));
    EXPECT_TRUE(full.starts.empty());
    EXPECT_EQ(full.finishes.at(1).exit_code, 1);
    EXPECT_EQ(full.finishes.at(1).text, "the job cannot start: all hosts have joined, but no host runs `b x`");
    // An elastic job waits for a host that does.
    Job elastic(two_programs(1, 3));
    elastic.join(0, running(0, {2, 0}));
    elastic.pass(milliseconds{250});
    EXPECT_TRUE(elastic.starts.empty());
    EXPECT_THAT(elastic.said, HasSubstr("1 of 1 to 3 hosts have joined: h0; no host runs `b x`"));
    elastic.join(1, running(1, {0, 1}));
    elastic.pass(milliseconds{100});
    EXPECT_EQ(elastic.starts.at(1).world_size, 3);
    // It needs one for as long as it runs.
    elastic.lose(1);
    elastic.end_all(0, 15, true);
    EXPECT_EQ(elastic.finishes.at(0).exit_code, 1);
    EXPECT_THAT(elastic.finishes.at(0).text, HasSubstr("1 host left; no host runs `b x`"));
    Job late(two_programs(1, 3));
    late.join(0, running(0, {2, 0}));
    late.pass(milliseconds{1000});
    EXPECT_THAT(late.finishes.at(0).text, HasSubstr("after 1 s, 1 of 1 to 3 hosts have joined: h0; no host runs"));
}

TEST(Coordinator, TooFewRanksLeftAreNamed) {
    RunOptions options = options_of(1, 2);
    options.min_ranks = 3;
    Job job(options);
    job.join(0, hello_of(0, 2));
    job.join(1, hello_of(1, 2));
    job.lose(1);
    job.end_all(0, 15, true);
    EXPECT_THAT(job.finishes.at(0).text, HasSubstr("2 ranks left, fewer than --min-ranks 3"));
}

TEST(Coordinator, HostsThatDifferAreRefusedWithBothNamesAndTheDifference) {
    const auto changed = [](const std::function<void(Hello&)>& change) {
        Hello hello = hello_of(1, 2, 1);
        hello.version = "1";
        hello.architecture = "x86_64";
        hello.agreed = {"--nnodes 3:3", "the command `a`"};
        change(hello);
        return hello;
    };
    const std::pair<std::function<void(Hello&)>, const char*> table[] = {
        {[](Hello& h) { h.version = "2"; }, "host h1 has Tessera 2, but host h0 has 1"},
        {[](Hello& h) { h.agreed[0] = "--nnodes 2:3"; }, "host h1 has --nnodes 2:3, but host h0 has --nnodes 3:3"},
        {[](Hello& h) { h.agreed[1] = "the command `b`"; }, "has the command `b`, but host h0 has the command `a`"},
        {[](Hello& h) { h.agreed.pop_back(); }, "host h1 has nothing, but host h0 has the command `a`"},
        {[](Hello& h) { h.agreed.emplace_back("--role x"); }, "host h1 has --role x, but host h0 has nothing"},
        {[](Hello& h) { h.node_rank = 0; }, "--node-rank 0 is given on two hosts: h0 and h1"},
        {[](Hello& h) { h.node_rank = -1; }, "host h0 has --node-rank 0, but host h1 has none"},
        {[](Hello& h) { h.node_rank = 3; }, "--node-rank 3 is not below the number of hosts, 3"},
        {[](Hello& h) { h.ranks = {1, 1}; }, "host h1 has 2 programs, but the job has 1 program"},
        {[](Hello& h) { h.ranks = {0}; }, "host h1 would have no rank"},
        {[](Hello& h) { h.ranks = {4095}; }, "the job would have 4097 ranks; at most 4096 are allowed"},
    };
    for (const auto& [change, message] : table) {
        Job job(options_of(3, 3));
        job.join(0, changed([](Hello& hello) {
                     hello.host = "h0";
                     hello.agent = "agent 0";
                     hello.node_rank = 0;
                 }));
        job.join(1, changed(change));
        EXPECT_THAT(job.refusals[1], HasSubstr(message));
        EXPECT_EQ(job.finishes[0].exit_code, 1) << message;
        EXPECT_THAT(job.finishes[0].text, HasSubstr(message));
    }
    // Ranks of two architectures can form a job, which says so.
    Job mixed(options_of(2, 2));
    mixed.join(0, changed([](Hello& hello) { hello = hello_of(0, 1); }));
    Hello arm = hello_of(1, 1);
    arm.architecture = "aarch64";
    mixed.join(1, arm);
    EXPECT_THAT(mixed.said, HasSubstr("host h1 is aarch64, but host h0 is "));
    EXPECT_EQ(mixed.starts.at(1).world_size, 2);
}

TEST(Coordinator, TheLastCallEndsTheWaitForMoreHosts) {
    Job job(options_of(1, 3));
    job.join(0, hello_of(0, 1));
    job.pass(milliseconds{99});
    EXPECT_TRUE(job.starts.empty());
    job.join(1, hello_of(1, 1));
    job.pass(milliseconds{1});
    EXPECT_EQ(job.starts.at(1).world_size, 2);
    EXPECT_FALSE(job.coordinator.next_tick());
}

TEST(Coordinator, ARestartWaitsForEveryHostAndIsCountedOnce) {
    RunOptions options = options_of(2, 2);
    options.max_restarts = 1;
    Job job(options);
    job.join(0, hello_of(0, 2));
    job.join(1, hello_of(1, 2));
    // Two ranks fail on two hosts.
    job.take(0, RankEnded{0, end_of({0, 0, 0}, 1 << 8)});
    job.take(1, RankEnded{0, end_of({2, 0, 0}, 1 << 8)});
    ASSERT_EQ(job.ends[1].size(), 1U);
    EXPECT_EQ(job.ends[1][0].manner, EndRanks::Manner::failure);
    job.end_all(0, 15, true);
    EXPECT_EQ(job.starts.at(0).round, 0) << "host 1 is not done";
    job.take(1, RoundOver{.round = 7, .cut_short = false, .master_port = 1});
    EXPECT_EQ(job.starts.at(0).round, 0) << "a zombie's word";
    job.end_all(1, 15, true);
    EXPECT_EQ(job.starts.at(1).round, 1);
    EXPECT_EQ(job.coordinator.restarts(), 1);
    job.end_all(0, 9 << 8, false);
    job.end_all(1, 15, true);
    EXPECT_EQ(job.finishes.at(0).exit_code, 9);
    EXPECT_EQ(job.finishes.at(1).exit_code, 9);
    EXPECT_THAT(job.finishes.at(0).text, HasSubstr("1 of 1 restarts used"));
    EXPECT_THAT(job.finishes.at(1).text, HasSubstr("the agent on h0 prints the report"));
}

TEST(Coordinator, ALostHostCostsNoRestartWhileEnoughAreLeft) {
    Job job(options_of(1, 3));
    for (int node = 0; node < 3; ++node) job.join(node, hello_of(node, 2));
    job.lose(1);
    EXPECT_EQ(job.ends[2].size(), 1U);
    job.end_all(0, 15, true);
    job.end_all(2, 15, true);
    EXPECT_EQ(job.starts.at(2).round, 1);
    EXPECT_EQ(job.starts.at(2).world_size, 4);
    EXPECT_EQ(job.starts.at(2).group_rank, 1);
    EXPECT_EQ(job.coordinator.restarts(), 0);
    EXPECT_THAT(job.said,
                HasSubstr("rank 2 was lost with its host h1: silence; starting round 1 with 4 ranks on 2 hosts"));
}

TEST(Coordinator, AHostThatIsNeededIsWaitedForAtThePriceOfARestart) {
    RunOptions options = options_of(2, 2);
    options.max_restarts = 1;
    Job job(options);
    job.join(0, hello_of(0, 1));
    job.join(1, hello_of(1, 1));
    job.lose(1);
    job.end_all(0, 15, true);
    EXPECT_EQ(job.starts.at(0).round, 0);
    EXPECT_EQ(job.coordinator.restarts(), 1);
    job.join(2, hello_of(2, 1));
    EXPECT_EQ(job.starts.at(2).round, 1);
    job.lose(2);
    job.end_all(0, 15, true);
    EXPECT_EQ(job.finishes.at(0).exit_code, 1);
    EXPECT_THAT(job.finishes.at(0).text, HasSubstr("1 host left, fewer than 2 (--nnodes); 1 of 1 restarts used"));
}

// --on-loss shrink
TEST(Coordinator, AHostThatHasLostAllItsRanksComesBackOnlyIfNoneIsLeft) {
    RunOptions options = options_of(2, 2);
    options.on_loss = OnLoss::shrink;
    options.min_ranks = 1;
    options.max_restarts = 1;
    Job job(options);
    job.join(0, hello_of(0, 1));
    job.join(1, hello_of(1, 3));
    // Rank 0 is lost with all that its host had, then another one.
    job.take(0, RankEnded{0, end_of({0, 0, 0}, SIGKILL)});
    job.over(0);
    job.end_all(1, 15, true);
    EXPECT_EQ(job.starts.at(1).round, 1);
    job.take(1, RankEnded{1, end_of({0, 0, 0}, SIGKILL)});
    for (const int rank : {1, 2}) job.take(1, RankEnded{1, end_of({rank, 0, 0}, 15, true)});
    job.over(1);
    EXPECT_EQ(job.starts.at(0).round, 0);
    EXPECT_EQ(job.starts.at(1).round, 2);
    EXPECT_EQ(job.starts.at(1).world_size, 2);
    // It is all that is left: the job begins anew with it and another one.
    job.lose(1);
    EXPECT_EQ(job.coordinator.restarts(), 1);
    job.join(2, hello_of(2, 2));
    EXPECT_EQ(job.starts.at(0).round, 3);
    EXPECT_EQ(job.starts.at(2).world_size, 3);
}

TEST(Coordinator, TheCauseIsTheFirstWhateverTheClocksSay) {
    Job job(options_of(2, 2, 1));
    job.join(0, hello_of(0, 1));
    job.join(1, hello_of(1, 1));
    RankEnd first = end_of({1, 0, 0}, 7 << 8);
    first.time = 2000;  // its clock is ahead
    job.take(1, RankEnded{0, first});
    job.over(1);
    job.now += milliseconds{500};
    RankEnd second = end_of({0, 0, 0}, 8 << 8, false, 90);
    second.time = 1000;
    job.take(0, RankEnded{0, second});
    job.over(0);
    EXPECT_EQ(job.finishes.at(0).exit_code, 7);
}

TEST(Coordinator, ALateHostBeginsARoundUnlessTheJobIsAboutToEnd) {
    Job job(options_of(1, 2));
    job.join(0, hello_of(0, 2));
    job.pass(milliseconds{100});
    job.take(0, RankEnded{0, end_of({0, 0, 0}, 0)});
    job.join(1, hello_of(1, 2));
    EXPECT_TRUE(job.ends[0].empty());
    job.take(0, RankEnded{0, end_of({1, 0, 1}, 0)});
    job.over(0);
    EXPECT_EQ(job.finishes.at(0).exit_code, 0);
    EXPECT_EQ(job.finishes.at(1).exit_code, 0) << "the host that waits hears of it";
    Job other(options_of(1, 2));
    other.join(0, hello_of(0, 2));
    other.pass(milliseconds{100});
    other.join(1, hello_of(1, 2));
    ASSERT_EQ(other.ends[0].size(), 1U);
    EXPECT_EQ(other.ends[0][0].manner, EndRanks::Manner::change);
    other.end_all(0, 0, false);
    EXPECT_EQ(other.starts.at(1).world_size, 4);
    EXPECT_EQ(other.coordinator.restarts(), 0);
}

TEST(Coordinator, AnAgentThatConnectsAgainReplacesItsOldConnection) {
    Job job(options_of(1, 2));
    job.join(0, hello_of(0, 1));
    job.join(1, hello_of(1, 1));
    job.join(5, hello_of(1, 1));
    job.end_all(0, 15, true);
    EXPECT_EQ(job.starts.at(5).round, 1);
    EXPECT_EQ(job.starts.at(5).group_size, 2);
    EXPECT_EQ(job.coordinator.restarts(), 0);
}

TEST(Coordinator, AThousandHostsFormARound) {
    Job job(options_of(1024, 1024, 4));
    for (int node = 0; node < 1024; ++node) job.join(node, hello_of(node, 4));
    EXPECT_EQ(job.starts.size(), 1024U);
    EXPECT_EQ(job.starts.at(1023).seats.back().rank, 4095);
    job.join(2000, hello_of(2000, 1));
    EXPECT_THAT(job.refusals.at(2000), HasSubstr("4097 ranks"));
}

// --- replacing ranks

RunOptions replacing(int restarts) {
    RunOptions options = options_of(2, 2);
    options.on_loss = OnLoss::replace;
    options.max_restarts = restarts;
    return options;
}

TEST(Coordinator, AKilledRankIsReplacedOnItsHostInTheSameRound) {
    Job job(replacing(1));
    job.join(0, hello_of(0, 1));
    job.join(1, hello_of(1, 2));
    job.take(1, RankEnded{0, end_of({2, 0, 1}, SIGKILL)});
    EXPECT_EQ(job.replaced, (std::vector<std::pair<Node, int>>{{1, 2}}));
    EXPECT_THAT(job.said, HasSubstr("rank 2 was killed by SIGKILL; another process takes its place, restart 1 of 1"));
    EXPECT_TRUE(job.coordinator.ended().empty()) << "nobody who waits for it may hear that it is gone";
    EXPECT_TRUE(job.ends.empty());
    EXPECT_EQ(job.coordinator.round(), 0);
    // The second one is too many: the round ends, and its cause is named, not the first.
    job.take(0, RankEnded{0, end_of({0, 0, 0}, SIGKILL)});
    EXPECT_EQ(job.replaced.size(), 1U);
    EXPECT_EQ(job.ends.at(1).size(), 1U);
    job.over(0);
    job.take(1, RankEnded{0, end_of({1, 0, 0}, SIGTERM, true)});
    job.take(1, RankEnded{0, end_of({2, 0, 1}, SIGTERM, true)});
    job.over(1);
    EXPECT_EQ(job.finishes.at(0).exit_code, 128 + SIGKILL);
    EXPECT_THAT(job.finishes.at(0).text, AllOf(HasSubstr("root cause: rank 0"), HasSubstr("1 of 1 restarts used")));
}

TEST(Coordinator, ARankIsNotReplacedForOthersThatHaveEnded) {
    Job job(replacing(5));
    job.join(0, hello_of(0, 2));
    job.join(1, hello_of(1, 1));
    job.take(0, RankEnded{0, end_of({0, 0, 0}, 0)});
    job.take(1, RankEnded{0, end_of({2, 0, 0}, SIGKILL)});
    EXPECT_TRUE(job.replaced.empty());
    EXPECT_EQ(job.ends.at(0).size(), 1U);
    job.over(1);
    job.take(0, RankEnded{0, end_of({1, 0, 1}, SIGTERM, true)});
    job.over(0);
    EXPECT_EQ(job.coordinator.round(), 1) << "all ranks start again";
}

// The ranks that were left could not continue: what they could not do without is the cause.
TEST(Coordinator, TheDeathOfAReplacedRankExplainsTheOthersFailures) {
    Job job(replacing(1));
    job.join(0, hello_of(0, 1));
    job.join(1, hello_of(1, 1));
    RankEnd killed = end_of({1, 0, 0}, SIGKILL);
    killed.pid = 77;
    job.take(1, RankEnded{0, killed});
    killed.last_lines = {"out of memory"};
    job.take(1, RankDetails{0, killed});
    RankEnd victim = end_of({0, 0, 0}, 3 << 8, false, 2);
    job.take(0, RankEnded{0, victim});
    victim.failure = RecordedError{.message = "rank 1 was lost", .traceback = "", .code = "PEER_LOST", .peer = 1};
    job.take(0, RankDetails{0, victim});
    job.over(0);
    job.take(1, RankEnded{0, end_of({1, 0, 0}, SIGTERM, true)});
    job.over(1);
    EXPECT_EQ(job.finishes.at(0).exit_code, 128 + SIGKILL);
    EXPECT_THAT(job.finishes.at(0).text, AllOf(HasSubstr("root cause: rank 1 (pid 77"), HasSubstr("out of memory")));
}

// The dead process is what rank 0 still reports, long after another took its place, which then fails on its own.
TEST(Coordinator, AReplacedRankThatFailsIsTheCause) {
    Job job(replacing(1));
    job.join(0, hello_of(0, 1));
    job.join(1, hello_of(1, 1));
    RankEnd killed = end_of({1, 0, 0}, SIGKILL);
    killed.pid = 77;
    job.take(1, RankEnded{0, killed});
    RankEnd late = end_of({1, 0, 0}, 3 << 8, false, 2);
    late.failure = RecordedError{.message = "rank 0 is late", .traceback = "", .code = "TIMEOUT", .peer = 0};
    job.take(1, RankEnded{0, late});
    job.over(1);
    RankEnd stopped = end_of({0, 0, 0}, SIGTERM, true);
    stopped.failure = RecordedError{.message = "rank 1 was lost", .traceback = "", .code = "PEER_LOST", .peer = 1};
    job.take(0, RankEnded{0, stopped});
    job.over(0);
    EXPECT_NE(job.finishes.at(0).exit_code, 0);
}

// --- the simulation

// A host as its agent would be: its orders and reports wait in queues of their own, so that hosts overtake each other.
struct Host {
    Hello hello;
    std::deque<Order> orders;
    std::deque<Report> reports;
    std::optional<StartRound> round;
    std::set<int> alive;
    std::set<int> killed;  // and neither replaced nor left to be
    bool ending = false;
};

class Simulation {
   public:
    explicit Simulation(unsigned seed) : random_(seed) {
        const int least = 1 + below(3);
        options_ = options_of(least, least + below(3), 1 + below(3));
        options_.max_restarts = below(4);
        const int modes = below(4);
        if (modes == 1) {
            options_.on_loss = OnLoss::shrink;
            options_.min_ranks = 1;
        } else if (modes == 2) {
            options_.on_loss = OnLoss::go_on;
            options_.min_ranks = 1;
        } else if (modes == 3) {
            options_.on_loss = OnLoss::replace;
        }
        coordinator_.emplace(options_, "job", 0, now_);
    }

    void run() {
        connect();
        for (int step = 0; step < 5000 && !coordinator_->finished(); ++step) {
            act(step);
            deliver_orders();
        }
        EXPECT_TRUE(coordinator_->finished()) << "it never ends";
        EXPECT_LE(coordinator_->restarts(), options_.max_restarts);
        EXPECT_LE(replaced_, coordinator_->restarts());
        EXPECT_EQ(starts_.size(), static_cast<size_t>(last_round_ + 1));
        for (const auto& [round, seats] : starts_) check_round(round, seats);
    }

   private:
    struct Started {
        Node node;
        StartRound start;
    };

    int below(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }

    void connect() {
        const Node node = next_++;
        Host& host = hosts_[node];
        host.hello = hello_of(node, options_.ranks());
        host.reports.emplace_back(host.hello);
    }

    void act(int step) {
        const int what = below(100);
        const bool late = step > 1500;  // faults stop at some time
        if (what < 2 && !late && hosts_.size() < 8) return connect();
        if (late && hosts_.size() < static_cast<size_t>(options_.hosts->min_nodes)) return connect();
        if (what < 4) {
            now_ += milliseconds{1 + below(300)};
            return coordinator_->tick(now_);
        }
        const auto host = std::next(hosts_.begin(), below(static_cast<int>(hosts_.size())));
        if (what == 4 && !late && host->first != 0 && below(4) == 0) {
            const Node node = host->first;
            hosts_.erase(host);
            return coordinator_->lose(node, "silence", now_);
        }
        if (what == 5 && below(50) == 0) {
            if (host->second.round || host->first == 0) host->second.reports.emplace_back(StopAsked{SIGTERM});
            return;
        }
        if (what < 50) return hear(host->first, host->second);
        if (what < 90) return obey(host->second);
        if (what < 92 || late) end_a_rank(host->second, late);
    }

    void hear(Node node, Host& host) {
        if (host.reports.empty()) return;
        const Report report = host.reports.front();
        host.reports.pop_front();
        coordinator_->take(node, report, now_);
    }

    void obey(Host& host) {
        if (host.orders.empty()) return;
        const Order order = host.orders.front();
        host.orders.pop_front();
        if (const auto* start = std::get_if<StartRound>(&order)) {
            EXPECT_TRUE(host.alive.empty()) << "ranks of two rounds on one host";
            EXPECT_FALSE(start->seats.empty()) << "a host without ranks takes part";
            host.round = *start;
            host.ending = false;
            for (const Seat& seat : start->seats) host.alive.insert(seat.rank);
        } else if (const auto* replace = std::get_if<ReplaceRank>(&order)) {
            EXPECT_EQ(replace->round, host.round->round);
            EXPECT_TRUE(host.alive.empty() || !host.alive.contains(replace->rank)) << "two processes of one rank";
            if (host.ending) return;
            EXPECT_EQ(host.killed.erase(replace->rank), 1U) << "a rank was replaced that nobody killed";
            host.alive.insert(replace->rank);
            ++replaced_;
        } else if (std::holds_alternative<EndRanks>(order)) {
            if (std::exchange(host.ending, true)) return;
            const bool waited = host.alive.empty() && !host.killed.empty();
            host.killed.clear();
            while (!host.alive.empty()) end(host, 15, true);
            if (waited) host.reports.emplace_back(RoundOver{host.round->round, true, 1});
        }
    }

    void end_a_rank(Host& host, bool well) {
        if (host.alive.empty()) return;
        const int way = well ? 0 : below(4);
        end(host, way == 3 ? 9 : way == 2 ? 1 << 8 : 0, false);
    }

    void end(Host& host, int status, bool by_agent) {
        const int rank = *host.alive.begin();
        host.alive.erase(host.alive.begin());
        host.reports.emplace_back(RankEnded{host.round->round, end_of({rank, 0, 0}, status, by_agent, ++turn_)});
        // As HostRanks does: a rank that was killed may be replaced until the round ends.
        if (options_.on_loss == OnLoss::replace && status == 9 && !host.ending) host.killed.insert(rank);
        if (!host.alive.empty() || !host.killed.empty()) return;
        host.reports.emplace_back(RoundOver{host.round->round, by_agent, 1});
    }

    void deliver_orders() {
        for (auto& [node, order] : coordinator_->take_orders()) {
            if (const auto* start = std::get_if<StartRound>(&order)) {
                for (const auto& [other, host] : hosts_) {
                    EXPECT_TRUE(host.alive.empty()) << "a round begins while ranks of the previous one live";
                }
                EXPECT_GE(start->round, last_round_) << "epochs count up";
                EXPECT_LE(start->round, last_round_ + 1);
                last_round_ = start->round;
                starts_[start->round].push_back({node, *start});
            }
            if (const auto host = hosts_.find(node); host != hosts_.end()) host->second.orders.push_back(order);
        }
    }

    void check_round(int round, const std::vector<Started>& started) {
        std::set<int> ranks;
        std::set<int> groups;
        for (const Started& one : started) {
            groups.insert(one.start.group_rank);
            for (const Seat& seat : one.start.seats) ranks.insert(seat.rank);
            EXPECT_EQ(one.start.world_size, started.front().start.world_size) << round;
            EXPECT_EQ(one.start.group_size, static_cast<int>(started.size())) << round;
            EXPECT_EQ(one.start.master_address, started.front().start.master_address) << round;
        }
        EXPECT_EQ(groups.size(), started.size()) << round;
        EXPECT_EQ(static_cast<int>(ranks.size()), started.front().start.world_size) << round;
        EXPECT_EQ(*ranks.rbegin(), started.front().start.world_size - 1) << round;
        EXPECT_LE(static_cast<int>(started.size()), options_.hosts->max_nodes);
    }

    std::mt19937 random_;
    RunOptions options_;
    Coordinator::Time now_;
    std::optional<Coordinator> coordinator_;
    std::map<Node, Host> hosts_;
    std::map<int, std::vector<Started>> starts_;
    Node next_ = 0;
    int last_round_ = -1;
    int turn_ = 0;
    int replaced_ = 0;
};

TEST(Coordinator, KeepsItsPromisesWhateverHappens) {
    const testing::Seed seed;
    const unsigned count = testing::takes_all() ? 10000 : 300;
    for (unsigned i = 0; i < count; ++i) {
        SCOPED_TRACE(fmt::format("simulation {}", seed + i));
        Simulation(seed + i).run();
        if (HasFailure()) return;
    }
}

}  // namespace
}  // namespace tsr
