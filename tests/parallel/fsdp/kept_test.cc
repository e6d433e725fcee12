// Units that are kept among fewer ranks than they are cut among, from their forward to their backward; and those whose
// memory stays theirs after it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "mlp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "patience.hpp"
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
    const auto store = make_memory_store(testing::patience(milliseconds{30000}));
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
                        HasSubstr("\"first\" is being unsharded"));
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

// --- after the backward

void leave(Fsdp& fsdp, bool leave = true) {
    for (size_t u = 0; u < fsdp.units(); ++u) fsdp.set_reshard_after_backward(u, !leave);
}

// By rank 0, into pages that all ranks of its host see, and which it alone looks at there. What nobody has in a shard tells a
// copy of before from a new one, where it is in the rows of another host's rank, which compares that host's.
void scribble(const Fsdp& fsdp, size_t param, size_t element) {
    const Tensor whole = fsdp.whole(param);
    const auto page = reinterpret_cast<uintptr_t>(whole.data) & ~uintptr_t{4095};
    ASSERT_EQ(::mprotect(reinterpret_cast<void*>(page), 4096, PROT_READ | PROT_WRITE), 0);  // read only without NDEBUG
    whole.as<float>()[element] = -5;
}

bool has(const Fsdp& fsdp, size_t param, int64_t element) {
    const Range& own = fsdp.param(param).elements;
    return own.begin <= element && element < own.end;
}

class LeftOverHosts : public ::testing::TestWithParam<Hosts> {};
INSTANTIATE_TEST_SUITE_P(Hosts, LeftOverHosts,
                         ::testing::Values(Hosts{1, 1, 0}, Hosts{4, 4, 0}, Hosts{4, 4, 1}, Hosts{4, 2, 0},
                                           Hosts{4, 2, 1}, Hosts{4, 1, 2}, Hosts{3, 1, 1}, Hosts{6, 3, 0}));

TEST_P(LeftOverHosts, ACopyIsUsedUntilAShardChanges) {
    const auto& [ranks, each, among] = GetParam();
    expect_all_well(run_on_hosts(ranks, each, [&, ranks = ranks, each = each, among = among](Communicator& comm) {
        Kept kept(comm, among);
        Fsdp& fsdp = *kept.fsdp;
        constexpr int64_t at = 36;  // of "w", in its last row
        const bool looks = comm.rank() == 0 || comm.rank() >= each || ranks == each;
        const auto step = [&](float expected, bool scribbles) {
            fsdp.forward(0);
            if (looks) {
                EXPECT_EQ(fsdp.whole(0).as<float>()[at], expected);
            }
            EXPECT_EQ(fsdp.whole(0).as<float>()[at - 1], static_cast<float>(at - 1));
            fsdp.forward_done(0);
            fsdp.forward(1);
            fsdp.forward_done(1);
            kept.backward([&](size_t unit) {
                if (scribbles && unit == 0 && ranks != each && comm.rank() == 0) scribble(fsdp, 0, at);
            });
            for (const size_t unit : {0, 1}) EXPECT_EQ(fsdp.phase(unit), UnitPhase::sharded);
            fsdp.check_idle("no step");
        };
        const auto set_shard = [&](float value) {
            if (!has(fsdp, 0, at)) return;
            const auto begin = static_cast<size_t>(at - fsdp.param(0).elements.begin);
            fsdp.shard(0).as<float>()[begin] = value;
        };
        const float left = ranks != each && comm.rank() < each ? -5 : at;
        leave(fsdp);
        step(at, true);
        step(left, true);
        step(left, true);
        set_shard(77);
        step(77, false);
        step(77, false);
        set_shard(at);
        step(at, true);
        if (comm.rank() == ranks - 1) fsdp.reshard(0);  // on one rank alone: the others copy, too
        step(at, true);
        leave(fsdp, false);
        step(left, true);
        step(at, false);
    }));
}

TEST(Left, AUnitIsShardedInBetween) {
    expect_all_well(run_on_hosts(2, 2, [](Communicator& comm) {
        Kept kept(comm, 0);
        Fsdp& fsdp = *kept.fsdp;
        leave(fsdp);
        expect_error([&] { fsdp.set_reshard_after_backward(2, false); }, Code::invalid_argument);
        fsdp.backward(1);
        EXPECT_THAT(expect_error([&] { fsdp.set_reshard_after_backward(1, true); }, Code::invalid_state).what(),
                    HasSubstr("during a backward pass"));
        fsdp.unused(1);
        fsdp.grads_ready(1);
        EXPECT_EQ(fsdp.phase(1), UnitPhase::reducing);
        fsdp.backward(0);
        fsdp.unused(0);
        fsdp.grads_ready(0);
        fsdp.wait();
        EXPECT_EQ(fsdp.phase(1), UnitPhase::sharded);
        EXPECT_THAT(expect_error([&] { (void)fsdp.whole(0); }, Code::invalid_state).what(), HasSubstr("is sharded"));
        expect_error([&] { fsdp.await_unit(0); }, Code::invalid_state);
        fsdp.zero_grad();
        fsdp.unshard(0);
        EXPECT_EQ(fsdp.phase(0), UnitPhase::on_its_way);
        fsdp.await_unit(0);
        kept.fill_shards(-1);
        EXPECT_EQ(fsdp.whole(0).as<float>()[3], 3) << "what is whole stays so";
        fsdp.abandon();
        fsdp.forward(0);
        EXPECT_THAT(fsdp.whole(0).as<float>(), Each(-1.0F));
        fsdp.abandon();
    }));
}

// The memory of one that was left it is no other's; one that no backward used keeps it as well.
TEST(Left, AUnitKeepsItsMemory) {
    expect_all_well(run_on_hosts(4, 2, [](Communicator& comm) {
        testing::Model model;
        for (size_t i = 0; i < 4; ++i) model.add(fmt::format("w{}", i), {12, 4}, static_cast<float>(i));
        std::vector<FsdpUnit> units;
        for (const NamedTensor& param : model.params()) {
            units.push_back({.name = "u" + param.name, .params = {param}, .reshard_after_forward = 1});
        }
        units[2].trained = {false};
        units[2].reshard_after_forward = 0;
        // Without prefetch the others find no memory but its.
        Fsdp fsdp(shared(comm), units, {.forward_prefetch = 0, .backward_prefetch = 0});
        fsdp.set_reshard_after_backward(1, false);
        fsdp.set_reshard_after_backward(2, false);
        const auto end_pass = [&](size_t u) {
            EXPECT_EQ(fsdp.whole(u).as<float>()[0], static_cast<float>(u));
            if (comm.rank() == 0) scribble(fsdp, u, 47);
        };
        for (int step = 0; step < 3; ++step) {
            for (size_t u = 0; u < 4; ++u) {
                fsdp.forward(u);
                const bool was_left = step > 0 && (u == 1 || u == 2) && comm.rank() == 0;
                const float expected = was_left ? -5.0F : static_cast<float>(u);
                if (comm.rank() != 1) {
                    EXPECT_EQ(fsdp.whole(u).as<float>()[47], expected) << "unit " << u;
                }
                if (u == 2) end_pass(u);
                fsdp.forward_done(u);
            }
            for (const size_t u : {3, 1, 0}) {
                fsdp.backward(u);
                end_pass(u);
                fsdp.unused(u);
                fsdp.grads_ready(u);
            }
            fsdp.wait();
        }
    }));
}

}  // namespace
}  // namespace tsr
