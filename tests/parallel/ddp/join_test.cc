// Ranks with different numbers of steps.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "optim/sgd.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "soon.hpp"
#include "with_grads.hpp"

namespace tsr {
namespace {

using ::testing::Each;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Model;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::three_layers;
using testing::with_grads;

DdpOptions joining(DdpJoin join, DdpOptions options = {}) {
    options.bucket_bytes = options.first_bucket_bytes = 64;
    options.join = join;
    return options;
}

void fill_all(const Ddp& ddp, float value) {
    for (size_t i = 0; i < ddp.params().size(); ++i) {
        for (float& g : ddp.grad(i).as<float>()) g = value;
    }
}

class DdpJoinBy : public ::testing::TestWithParam<DdpJoin> {};
INSTANTIATE_TEST_SUITE_P(Divisors, DdpJoinBy, ::testing::Values(DdpJoin::divide_by_world, DdpJoin::divide_by_active));

TEST_P(DdpJoinBy, RanksThatHaveJoinedAddZerosToTheStepsOfTheOthers) {
    expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), joining(GetParam()));
        for (int round = 0; round < 2; ++round) {  // in the second, other ranks have most data
            const auto steps_of = [&](int rank) { return round == 0 ? 2 * rank : 5 - rank; };
            for (int step = 0; step < steps_of(comm.rank()); ++step) {
                int active = 0;
                float sum = 0;
                for (int r = 0; r < 4; ++r) {
                    if (steps_of(r) <= step) continue;
                    ++active;
                    sum += static_cast<float>(12 * (r + 1));
                }
                fill_all(ddp, static_cast<float>(12 * (comm.rank() + 1)));
                ddp.ready_all();
                ddp.wait();
                const float by = GetParam() == DdpJoin::divide_by_world ? 4 : static_cast<float>(active);
                EXPECT_THAT(ddp.grad(0).as<float>(), Each(::testing::FloatEq(sum / by)));
                EXPECT_THAT(ddp.grad(2).as<float>(), Each(::testing::FloatEq(sum / by)));
            }
            ddp.join(false);
            EXPECT_THAT(ddp.grad(0).as<float>(), Each(0.0F));
        }
    }));
}

TEST(DdpJoins, AllGetTheParametersAndBuffersOfARankThatMadeMostSteps) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers(0);
        Ddp ddp(shared(comm), model.params(), joining(DdpJoin::divide_by_active));
        Sgd optimizer(with_grads(ddp), {.lr = 1});
        std::array<int64_t, 1> batches{};
        ddp.register_buffers({{"batches", tensor_of(std::span<int64_t>(batches), DType::i64)}});
        const int steps = comm.rank() == 1 ? 5 : 2;
        for (int step = 0; step < steps; ++step) {
            ddp.broadcast_buffers();
            EXPECT_EQ(batches[0], step) << "of rank 0, or of rank 1 when that has joined";
            fill_all(ddp, -1);
            ddp.ready_all();
            ddp.wait();
            optimizer.step();
            ++batches[0];
        }
        ddp.join(true);
        EXPECT_THAT(model.entries[0].values, Each(5.0F));
        EXPECT_EQ(batches[0], 5);
    }));
}

TEST(DdpJoins, EachKeepsItsParametersIfNothingElseIsWanted) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers(0);
        Ddp ddp(shared(comm), model.params(), joining(DdpJoin::divide_by_world));
        Sgd optimizer(with_grads(ddp), {.lr = 1});
        ddp.step_in_backward(optimizer);
        for (int step = 0; step <= comm.rank(); ++step) {
            fill_all(ddp, -1);
            ddp.ready_all();
            ddp.wait();
        }
        ddp.join(false);
        EXPECT_THAT(model.entries[0].values, Each(comm.rank() == 0 ? 1.0F : 1.5F))
            << "a rank that has joined makes no step";
        EXPECT_EQ(optimizer.steps(), comm.rank() + 1);
    }));
}

TEST(DdpJoins, ARankWithoutAnyDataTakesPartInEverything) {
    for (const DdpOptions& options : std::vector<DdpOptions>{{.find_unused = true},
                                                             {.static_graph = true},
                                                             {.rebuild_buckets = true},
                                                             {.reduce_dtype = DType::bf16},
                                                             {.hook = DdpHook::power_sgd, .power_sgd_start_step = 1},
                                                             {.hook = DdpHook::noop}}) {
        for (const int idle : {0, 1}) {
            expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
                Model model = three_layers();
                Ddp ddp(shared(comm), model.params(), joining(DdpJoin::divide_by_active, options));
                for (int round = 0; round < 2; ++round) {
                    for (int step = 0; step < 3 && (round == 1 || comm.rank() != idle); ++step) {
                        fill_all(ddp, 8);
                        ddp.ready(1);
                        ddp.ready(0);
                        if (!options.find_unused && !options.static_graph) ddp.ready(2);
                        ddp.wait();
                        EXPECT_THAT(ddp.grad(1).as<float>(), Each(::testing::FloatNear(8, 0.01F))) << "round " << round;
                    }
                    ddp.join(true);
                }
            }));
        }
    }
}

TEST(DdpJoins, NeedTheOptionAndTheSameWish) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp plain(shared(comm), model.params(), {});
        EXPECT_THAT(expect_error([&] { plain.join(true); }, Code::invalid_state).what(),
                    HasSubstr("created without the join option"));
        Ddp ddp(shared(comm), model.params(), joining(DdpJoin::divide_by_world));
        EXPECT_THAT(expect_error([&] { ddp.join(comm.rank() == 0); }, Code::mismatch).what(),
                    HasSubstr("rank 1 joins with sync_params 0, but rank 0 with 1"));
        ddp.join(true);  // none has made a step
        ddp.ready(0);
        expect_error([&] { ddp.join(true); }, Code::invalid_state);
        ddp.ready_all();
        ddp.wait();
    }));
}

TEST(DdpJoins, RanksThatDoDifferentThingsAreNamed) {
    const Outcomes outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), joining(DdpJoin::divide_by_world));
        std::array<float, 1> mean{};
        ddp.register_buffers({{"mean", tensor_of(std::span<float>(mean), DType::f32)}});
        if (comm.rank() == 2) {
            ddp.broadcast_buffers();
        } else if (comm.rank() == 1) {
            ddp.ready_all();
            ddp.wait();
        } else {
            ddp.join(true);
        }
    });
    for (size_t r = 0; r < outcomes.size(); ++r) {
        const auto& outcome = outcomes[r];
        ASSERT_TRUE(outcome);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 begins a step, but rank 2 broadcasts buffers"));
        // Rank 1 may learn of it only when it starts its next bucket, on a communicator that is out of use by then.
        if (r == 1 && outcome->code() == Code::aborted) continue;
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
    }
}

TEST(DdpJoins, ARankThatNeverComesIsNamedAtTheDeadline) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), joining(DdpJoin::divide_by_world));
        if (comm.rank() == 0) {
            comm.set_timeout(milliseconds{300});
            ddp.join(true);
        } else {
            wait_until([&] { return comm.error().has_value(); }, testing::soon(), "the other's error");
        }
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::timeout);
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("rank 1"));
    EXPECT_FALSE(outcomes[1]);
}

}  // namespace
}  // namespace tsr
