// `tessera run --on-loss replace`: a killed rank comes back in the same round, the others stay in their processes.
#include <map>
#include <set>

#include "launch/agents.hpp"
#include "places.hpp"
#include "run_fixture.hpp"

namespace tsr {
namespace {

using testing::Agents;
using testing::alive;
using ::testing::AllOf;
using testing::Child;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::read_file;
using testing::Result;
using testing::Run;

class Replace : public Run {
   protected:
    // Trains with `kills` (tests/launch/programs/replaced.c).
    Result train(int ranks, const std::string& root, const std::vector<std::string>& kills,
                 std::vector<std::string> options = {}) {
        options.insert(options.end(), {"-n", std::to_string(ranks), "--timeout-s", "60", "--events", events_path(),
                                       tsr::testing::binary_dir() + "/tests/replaced", scratch() + "/" + root});
        options.insert(options.end(), kills.begin(), kills.end());
        return run(options);
    }
    [[nodiscard]] std::string weights(int rank) const { return file("weights-" + std::to_string(rank)); }
    // How many processes each rank has had.
    [[nodiscard]] std::map<int64_t, int> lives() const {
        std::map<int64_t, int> counts;
        for (const Json& event : events()) {
            if (event.at("event").as_string() == "start") ++counts[event.at("rank").as_int()];
        }
        return counts;
    }
    void expect_nothing_left() const {
        for (const Json& event : events()) {
            if (event.at("event").as_string() == "start") {
                EXPECT_FALSE(alive(static_cast<pid_t>(event.at("pid").as_int())));
            }
        }
    }
};

// In a reduction; twice in a row; rank 0, which commits saves; and two that die while the others grow.
TEST_F(Replace, KilledRanksComeBackAndTheTrainingHasTheSameBits) {
    const Result calm = train(3, "calm", {});
    ASSERT_EQ(calm.code, 0) << calm.err;
    const std::string expected = weights(0);
    ASSERT_EQ(expected.size(), 2U * 3000 * sizeof(float));
    const std::string files = file("files-2");
    const Result result =
        train(3, "disturbed", {"1:0:3", "1:1:4", "0:0:9", "1:2:0"}, {"--on-loss", "replace", "--max-restarts", "6"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err,
                AllOf(HasSubstr("rank 1 was killed by SIGKILL; another process takes its place, restart 1 of "
                                "6 (--on-loss replace)"),
                      HasSubstr("restart 4 of 6"), Not(HasSubstr("starting round"))));
    for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(weights(rank) == expected) << "rank " << rank;
    EXPECT_EQ(lives(), (std::map<int64_t, int>{{0, 2}, {1, 4}, {2, 1}}));
    EXPECT_EQ(file("files-2"), files) << "descriptors but sockets that a rank has after three failures";
    int replaced = 0;
    for (const Json& event : events()) {
        EXPECT_NE(event.at("event").as_string(), "restart");
        if (event.at("event").as_string() == "replace") ++replaced;
    }
    EXPECT_EQ(replaced, 4);
    expect_nothing_left();
}

TEST_F(Replace, WhenNoRestartIsLeftTheJobEndsWithTheCause) {
    const Result result = train(3, "root", {"1:0:3", "2:0:6"}, {"--on-loss", "replace", "--max-restarts", "1"});
    EXPECT_EQ(result.code, 128 + SIGKILL);
    EXPECT_THAT(result.err, AllOf(HasSubstr("root cause: rank 2"), HasSubstr("1 of 1 restarts used (--max-restarts)")));
    expect_nothing_left();
}

TEST_F(Replace, ALossThatTheOthersDoNotSurviveIsTheCause) {
    const Result result =
        train(2, "root", {"1:0:3"}, {"--on-loss", "replace", "--max-restarts", "1", "--env", "NO_GROW=1"});
    EXPECT_EQ(result.code, 128 + SIGKILL);
    EXPECT_THAT(result.err, HasSubstr("root cause: rank 1"));
    expect_nothing_left();
}

TEST_F(Replace, WhatADeadRankStartedDiesWithItAndItsLogStays) {
    const Result result =
        run_shell({"-n", "2", "--on-loss", "replace", "--max-restarts", "1", "--log-dir", scratch() + "/logs"},
                  "if [ $RANK = 0 ]; then while [ ! -e $D/done ]; do sleep 0.01; done; exit 0; fi;"
                  "if [ $TESSERA_REPLACEMENT = 0 ]; then sleep 600 & echo $! > $D/child; echo first; kill -9 $$; fi;"
                  "i=0; while kill -0 $(cat $D/child) 2> /dev/null; do i=$((i+1)); [ $i -gt 1000 ] && exit 9; "
                  "sleep 0.01; done; echo second; echo > $D/done");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(file("logs/round-0/rank-1.log"), "first\n");
    EXPECT_EQ(file("logs/round-0/rank-1-replacement-1.log"), "second\n");
}

class ReplaceOnHosts : public Agents {};

// The only rank of a host that does not coordinate.
TEST_F(ReplaceOnHosts, TheHostOfTheDeadRankStartsAnotherProcess) {
    const std::vector<std::string> options = {"--nnodes",       "2", "-n", "1", "--on-loss", "replace",
                                              "--max-restarts", "1"};
    const std::vector<std::string> command = {tsr::testing::binary_dir() + "/tests/replaced", scratch() + "/root",
                                              "1:0:3"};
    Child a = start_on("a", options, command);
    await_said("a", "waiting for more hosts");
    Child b = start_on("b", options, command);
    EXPECT_EQ(a.wait(), 0) << said("a") << said("b");
    EXPECT_EQ(b.wait(), 0) << said("b");
    EXPECT_THAT(said("b"), AllOf(HasSubstr("rank 1 was killed by SIGKILL; another process takes its place"),
                                 Not(HasSubstr("starting round"))));
    EXPECT_TRUE(file("weights-0") == file("weights-1"));
    EXPECT_FALSE(file("weights-0").empty());
}

}  // namespace
}  // namespace tsr
