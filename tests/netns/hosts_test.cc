// One agent of `tessera run` on each host of a network that can be cut.
#include "launch/agents.hpp"
#include "launch/coordinator.hpp"
#include "netns/networks.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class NetnsAgents : public Agents {
   protected:
    void SetUp() override {
        if (const std::string why = Networks::obstacle(); !why.empty()) {
            GTEST_SKIP() << "needs network name spaces: " << why;
        }
        networks_.emplace(3);
        endpoint_ = host_address(0) + ":29400";
    }
    Child start_at(int host, std::vector<std::string> options, const std::vector<std::string>& command) {
        return start_on(name_of(host), std::move(options), command, [&] { networks_->enter_host(host); });
    }
    static std::string name_of(int host) { return "h" + std::to_string(host); }

    std::optional<Networks> networks_;
};

TEST_F(NetnsAgents, ThreeHostsRestartTogetherAndGoOnWithoutALostAgent) {
    const std::vector<std::string> options = {"--nnodes", "2:3", "-n", "2", "--max-restarts", "1", "--grace-s", "0.2"};
    std::vector<Child> agents;
    for (int host = 0; host < 3; ++host) agents.push_back(start_at(host, options, {meets_, "on"}));
    const std::vector<pid_t> first = await_met(0, 6);
    ::kill(first[5], SIGKILL);
    const std::vector<pid_t> second = await_met(1, 6);
    for (const pid_t pid : first) expect_dies(pid);
    EXPECT_THAT(said("h0"), HasSubstr("rank 5 was killed by SIGKILL"));
    EXPECT_THAT(said("h0"), HasSubstr("starting round 1 with 6 ranks, restart 1 of 1"));
    ::kill(child_of(agents[1].pid()), SIGKILL);
    (void)await_met(2, 4);
    for (const pid_t pid : second) expect_dies(pid);
    EXPECT_THAT(said("h2"), AllOf(HasSubstr("was lost with its host"), HasSubstr("its agent has ended"),
                                  HasSubstr("starting round 2 with 4 ranks on 2 hosts")));
    let_go();
    EXPECT_EQ(agents[0].wait(), 0) << said("h0");
    EXPECT_EQ(agents[2].wait(), 0) << said("h2");
    EXPECT_NE(agents[1].wait(), 0);
}

TEST_F(NetnsAgents, AHostThatIsCutOffIsMissedAndComesBack) {
    const std::vector<std::string> options = {
        "--nnodes",  "1:2", "-n",          "2",
        "--grace-s", "0.2", "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2"};
    Child a = start_at(0, options, {meets_, "on"});
    await_said("h0", "waiting for more hosts");
    Child b = start_at(1, options, {meets_, "on"});
    const std::vector<pid_t> first = await_met(0, 4);
    networks_->cut(1);
    (void)await_met(1, 2);
    for (const pid_t pid : first) expect_dies(pid);
    EXPECT_THAT(said("h0"), AllOf(HasSubstr("its agent has not been heard for 2 s"),
                                  HasSubstr("starting round 1 with 2 ranks on 1 host")));
    await_said("h1", "trying to join again");
    networks_->mend(1);
    (void)await_met(2, 4);
    let_go();
    EXPECT_EQ(a.wait(), 0) << said("h0");
    EXPECT_EQ(b.wait(), 0) << said("h1");
}

TEST_F(NetnsAgents, ASpareTakesOverFromAHostThatIsCutOff) {
    const std::vector<std::string> options = {
        "--nnodes",  "2:3", "--store-hosts", host_address(1) + "," + host_address(2),
        "--grace-s", "0.2", "--rdzv-conf",   "keep_alive_interval=1,keep_alive_max_attempt=2"};
    std::vector<Child> agents;
    for (int host = 0; host < 3; ++host) agents.push_back(start_at(host, options, {meets_, "on"}));
    const std::vector<pid_t> first = await_met(0, 3);
    networks_->cut(0);
    (void)await_met(Coordinator::first_round(1), 2);
    for (const pid_t pid : first) expect_dies(pid);
    await_said("h0", "fewer than 2 of 3 store hosts follow it (--store-hosts)");
    EXPECT_THAT(said("h1"), HasSubstr("coordinates the job from now on, term 1"));
    networks_->mend(0);
    (void)await_met(Coordinator::first_round(1) + 1, 3);
    let_go();
    for (int host = 0; host < 3; ++host) EXPECT_EQ(agents[static_cast<size_t>(host)].wait(), 0) << said(name_of(host));
}

// The job ends in its deadline where the host that is cut off owns the endpoint.
TEST_F(NetnsAgents, AHostThatIsNeededEndsTheJobWhenItIsCutOff) {
    const std::vector<std::string> options = {"--nnodes", "3", "--rdzv-conf",
                                              "keep_alive_interval=1,keep_alive_max_attempt=2"};
    std::vector<Child> agents;
    for (int host = 0; host < 3; ++host) agents.push_back(start_at(host, options, {meets_, "on"}));
    const std::vector<pid_t> pids = await_met(0, 3);
    networks_->cut(0);
    for (int host = 0; host < 3; ++host) EXPECT_EQ(agents[static_cast<size_t>(host)].wait(), 1) << said(name_of(host));
    for (const pid_t pid : pids) expect_dies(pid);
    for (const int host : {1, 2}) {
        EXPECT_THAT(said(name_of(host)),
                    AllOf(HasSubstr("lost the coordinating agent on host "),
                          HasSubstr(" at tcp://10.213.77.1:29400: it has not been heard for 2 s")));
    }
    EXPECT_THAT(said("h0"), HasSubstr("1 host left, fewer than 3 (--nnodes)"));
}

}  // namespace
}  // namespace tsr::testing
