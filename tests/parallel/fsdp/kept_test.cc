// Units that are kept among fewer ranks than they are cut among, from their forward to their backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "mlp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "ranks.hpp"

namespace tsr {
namespace {

using ::testing::Each;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::shared;

// Ranks of which each `each` that follow each other are on a host.
testing::Outcomes run_on_hosts(int ranks, int each, const std::function<void(Communicator&)>& body) {
    const auto store = make_memory_store(milliseconds{30000});
    return testing::run_threads(ranks, [&](int rank) {
        CommOptions options = testing::test_options("auto");  // also where other tests run over gloo
        options.host_id = std::to_string(rank / each);
        const auto comm = testing::join_job(store, rank, ranks, options);
        body(*comm);
    });
}

struct Kept {
    testing::Model model;
    std::optional<Fsdp> fsdp;

    Kept(Communicator& comm, int among) {
        model.add("w", {13, 3});
        model.add("b", {5});
        for (auto& entry : model.entries) {
            for (size_t k = 0; k < entry.values.size(); ++k) entry.values[k] = static_cast<float>(k);
        }
        FsdpUnit first{.name = "first", .params = {model.params()[0]}, .reshard_after_forward = among};
        FsdpUnit second{.name = "second", .params = {model.params()[1]}, .reshard_after_forward = among, .flat = true};
        fsdp.emplace(shared(comm), std::vector<FsdpUnit>{first, second}, FsdpOptions{});
    }

    void fill_shards(float value) const {
        for (const size_t i : {0, 1}) {
            for (float& v : fsdp->shard(i).as<float>()) v = value;
        }
    }
    void forward() {
        for (const size_t unit : {0, 1}) {
            fsdp->forward(unit);
            fsdp->forward_done(unit);
        }
    }
    void expect_values() const {
        for (const size_t i : {0, 1}) {
            const auto whole = fsdp->whole(i).as<float>();
            for (size_t k = 0; k < whole.size(); ++k) ASSERT_EQ(whole[k], static_cast<float>(k));
        }
    }
    void backward(const std::function<void(size_t param)>& check) {
        for (const size_t unit : {1, 0}) {
            fsdp->backward(unit);
            check(unit);
            fsdp->unused(unit);
            fsdp->grads_ready(unit);
        }
        fsdp->wait();
    }
};

struct Hosts {
    int ranks;
    int each;
    int among;
};

class KeptOverHosts : public ::testing::TestWithParam<Hosts> {};
INSTANTIATE_TEST_SUITE_P(Hosts, KeptOverHosts,
                         ::testing::Values(Hosts{4, 1, 2}, Hosts{8, 2, 4}, Hosts{6, 1, 3}, Hosts{6, 1, 2},
                                           Hosts{8, 1, 4}));

TEST_P(KeptOverHosts, TheBackwardHasWhatWasKept) {
    const auto& [ranks, each, among] = GetParam();
    expect_all_well(run_on_hosts(ranks, each, [&, among = among](Communicator& comm) {
        Kept kept(comm, among);
        for (int step = 0; step < 3; ++step) {
            kept.forward();
            EXPECT_EQ(kept.fsdp->phase(0), UnitPhase::on_its_way);
            EXPECT_THAT(expect_error([&] { kept.fsdp->check_idle("no step"); }, Code::invalid_state).what(),
                        HasSubstr("\"first\" is on its way"));
            kept.fill_shards(-1);  // seen if whole parameters were of the shards
            kept.backward([&](size_t i) {
                const auto whole = kept.fsdp->whole(i).as<float>();
                for (size_t k = 0; k < whole.size(); ++k) ASSERT_EQ(whole[k], static_cast<float>(k));
            });
            // From here on shards count again, and so they do after a reshard and an abandoned step.
            const auto seen = [&] {
                kept.fsdp->forward(0);
                EXPECT_THAT(kept.fsdp->whole(0).as<float>(), Each(-1.0F));
                kept.fsdp->forward_done(0);
            };
            seen();
            kept.fsdp->reshard(0);
            EXPECT_EQ(kept.fsdp->phase(0), UnitPhase::sharded);
            seen();
            kept.fsdp->abandon();
            kept.fsdp->check_idle("a step");
            for (const size_t i : {0, 1}) {
                const Tensor shard = kept.fsdp->shard(i);
                auto values = shard.as<float>();
                for (size_t k = 0; k < values.size(); ++k) {
                    values[k] = static_cast<float>(kept.fsdp->param(i).elements.begin + static_cast<int64_t>(k));
                }
            }
        }
    }));
}

TEST(Kept, WhereTheRanksFitOnAHostAllOfItStaysThere) {
    for (const auto& [ranks, each, among] : {Hosts{4, 4, 2}, Hosts{4, 2, 2}, Hosts{6, 3, 2}}) {
        expect_all_well(run_on_hosts(ranks, each, [among = among](Communicator& comm) {
            Kept kept(comm, among);
            kept.forward();
            EXPECT_EQ(kept.fsdp->phase(0), UnitPhase::whole);
            kept.expect_values();
            kept.backward([](size_t) {});
        }));
    }
}

TEST(Kept, WhatAllRanksWouldKeepTogetherIsSharded) {
    for (const auto& [ranks, each, among] : {Hosts{4, 1, 4}, Hosts{4, 2, 4}, Hosts{6, 2, 3}, Hosts{4, 3, 2}}) {
        expect_all_well(run_on_hosts(ranks, each, [among = among](Communicator& comm) {
            Kept kept(comm, among);
            kept.forward();
            EXPECT_EQ(kept.fsdp->phase(0), UnitPhase::sharded);
            kept.backward([](size_t) {});
        }));
    }
}

}  // namespace
}  // namespace tsr
