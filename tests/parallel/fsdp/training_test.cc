// Whole trainings: sharded ranks learn what one rank learns with the whole batch, and what ranks learn under DDP,
// whatever the schedule.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "mlp.hpp"
#include "optim/adam.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "tensor/convert.hpp"
#include "units.hpp"

namespace tsr {
namespace {

using testing::a_unit_a_layer;
using testing::expect_all_well;
using testing::FsdpOverWorlds;
using testing::Mlp;
using testing::Model;
using testing::run_ranks;
using testing::sharded;
using testing::shared;
using testing::test_options;

// Which units are asked for before one's forward or backward.
using Lists = std::array<std::vector<size_t>, Mlp::layers>;

Mlp::Hooks hooks_of(Fsdp& fsdp, const Lists& forward = {}, const Lists& backward = {}) {
    return {[&fsdp, forward](size_t l) {
                for (const size_t unit : forward.at(l)) fsdp.unshard(unit);
                fsdp.forward(l);
            },
            [&fsdp](size_t l) { fsdp.forward_done(l); },
            [&fsdp, backward](size_t l) {
                for (const size_t unit : backward.at(l)) fsdp.unshard(unit);
                fsdp.backward(l);
            },
            [&fsdp](size_t l) { fsdp.grads_ready(l); }};
}

constexpr size_t batch_size = 60;  // that 1 to 5 ranks divide
constexpr int training_steps = 50;

// One rank with the whole batch.
std::vector<float> losses_alone() {
    Model model = Mlp::initial();
    auto params = model.params();
    Model zeros = model;
    auto grads = zeros.params();
    std::vector<OptimizerParam> all;
    for (size_t i = 0; i < params.size(); ++i) all.push_back({params[i].name, params[i].tensor, grads[i].tensor});
    Adam optimizer(all, {.lr = 0.01, .decay = Decay::decoupled});
    std::vector<float> losses;
    for (int step = 0; step < training_steps; ++step) {
        losses.push_back(Mlp::forward_backward(
            Mlp::batch(static_cast<uint64_t>(step) * batch_size, batch_size),
            [&](size_t i) { return model.entries[i].values.data(); },
            [&](size_t i) { return zeros.entries[i].values.data(); }, false, {}));
        optimizer.step();
    }
    return losses;
}

// The same over ranks: each step's loss, averaged.
std::vector<float> losses_sharded(Communicator& comm, const FsdpOptions& options,
                                  const std::function<void(std::vector<FsdpUnit>&)>& change = {},
                                  const Lists& forward = {}, const Lists& backward = {}) {
    Model model = Mlp::initial(static_cast<uint64_t>(comm.rank()) + 1);  // rank 0's count
    auto units = a_unit_a_layer(model);
    if (change) change(units);
    Fsdp fsdp(shared(comm), units, options);
    Adam optimizer(sharded(fsdp), {.lr = 0.01, .decay = Decay::decoupled});
    optimizer.set_gate([&] { fsdp.check_idle("the optimizer cannot change the shards"); });
    const auto whole = [&](size_t i) { return fsdp.whole(i).as<float>().data(); };
    const auto grad = [&](size_t i) { return fsdp.grad(i).as<float>().data(); };
    std::vector<float> losses;
    const size_t own = batch_size / static_cast<size_t>(comm.world_size());
    for (int step = 0; step < training_steps; ++step) {
        std::array<float, 1> loss{Mlp::forward_backward(
            Mlp::batch(static_cast<uint64_t>(step) * batch_size + own * static_cast<size_t>(comm.rank()), own), whole,
            grad, false, hooks_of(fsdp, forward, backward))};
        fsdp.wait();
        optimizer.step();
        const Tensor tensor = tensor_of(std::span<float>(loss), DType::f32);
        comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::avg});
        losses.push_back(loss[0]);
    }
    return losses;
}

void expect_close(const std::vector<float>& losses, const std::vector<float>& expected, float tolerance) {
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i) {
        ASSERT_NEAR(losses[i], expected[i], tolerance * std::abs(expected[i])) << "step " << i;
    }
    EXPECT_LT(losses.back(), 0.9F * losses.front()) << "it learns";
}

TEST_P(FsdpOverWorlds, RanksTrainAsOneRankDoes) {
    const std::vector<float> expected = losses_alone();
    expect_all_well(run_ranks(GetParam(), test_options(),
                              [&](Communicator& comm) { expect_close(losses_sharded(comm, {}), expected, 1e-4F); }));
}

// The same under DDP.
std::vector<float> losses_replicated(Communicator& comm) {
    Model model = Mlp::initial(static_cast<uint64_t>(comm.rank()) + 1);  // rank 0's count
    const auto params = model.params();
    Ddp ddp(shared(comm), params, {});
    std::vector<OptimizerParam> all;
    for (size_t i = 0; i < params.size(); ++i) all.push_back({params[i].name, params[i].tensor, ddp.grad(i)});
    Adam optimizer(all, {.lr = 0.01, .decay = Decay::decoupled});
    const Mlp::Hooks hooks{.grads_ready = [&](size_t l) {
        ddp.ready(2 * l);
        ddp.ready(2 * l + 1);
    }};
    std::vector<float> losses;
    const size_t own = batch_size / static_cast<size_t>(comm.world_size());
    for (int step = 0; step < training_steps; ++step) {
        std::array<float, 1> loss{Mlp::forward_backward(
            Mlp::batch(static_cast<uint64_t>(step) * batch_size + own * static_cast<size_t>(comm.rank()), own),
            [&](size_t i) { return params[i].tensor.as<float>().data(); },
            [&](size_t i) { return ddp.grad(i).as<float>().data(); }, false, hooks)};
        ddp.wait();
        optimizer.step();
        const Tensor tensor = tensor_of(std::span<float>(loss), DType::f32);
        comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::avg});
        losses.push_back(loss[0]);
    }
    return losses;
}

TEST_P(FsdpOverWorlds, RanksTrainAsUnderDdp) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        expect_close(losses_sharded(comm, {}), losses_replicated(comm), 1e-4F);
    }));
}

TEST(Fsdp, RepeatsAreEqualToTheBit) {
    std::array<std::vector<float>, 2> runs;
    for (auto& run : runs) {
        expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
            const auto losses = losses_sharded(comm, {});
            if (comm.rank() == 0) run = losses;
        }));
    }
    EXPECT_EQ(runs[0], runs[1]);
}

TEST(Fsdp, EachScheduleTrainsAlike) {
    std::vector<float> expected;
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        const auto losses = losses_sharded(comm, {});
        if (comm.rank() == 0) expected = losses;
    }));
    const std::vector<FsdpOptions> schedules{{.forward_prefetch = 0, .backward_prefetch = 0},
                                             {.forward_prefetch = 3, .backward_prefetch = 3},
                                             {.grads_in_flight = 1},
                                             {.grads_in_flight = 5}};
    for (const FsdpOptions& options : schedules) {
        expect_all_well(run_ranks(2, test_options(),
                                  [&](Communicator& comm) { EXPECT_EQ(losses_sharded(comm, options), expected); }));
    }
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        const Lists forward{{{0, 2, 1}, {}, {}}};
        const Lists backward{{{}, {1, 0}, {2, 0}}};
        const FsdpOptions none{.forward_prefetch = 0, .backward_prefetch = 0};
        EXPECT_EQ(losses_sharded(comm, none, {}, forward, backward), expected) << "lists of its own";
    }));
    for (const std::vector<size_t>& kept : {std::vector<size_t>{0}, {2}, {0, 1, 2}}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            EXPECT_EQ(losses_sharded(comm, {},
                                     [&](std::vector<FsdpUnit>& units) {
                                         for (const size_t u : kept) units[u].reshard_after_forward = 0;
                                     }),
                      expected);
        }));
    }
}

TEST(Fsdp, ReducedInBf16ItStillLearnsTheSame) {
    const std::vector<float> expected = losses_alone();
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = Mlp::initial(1);
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {.param_dtype = DType::bf16});
        Adam optimizer(sharded(fsdp), {.lr = 0.01, .decay = Decay::decoupled});
        // The trainer computes in f32 from bf16 parameters, and its gradients become bf16.
        std::array<std::vector<float>, 6> params;
        std::array<std::vector<float>, 6> grads;
        for (size_t i = 0; i < 6; ++i) {
            params.at(i).resize(static_cast<size_t>(fsdp.param(i).shape.product()));
            grads.at(i).resize(params.at(i).size());
        }
        const auto hooks = hooks_of(fsdp);
        Mlp::Hooks converting = hooks;
        const auto widen = [&](size_t l) {
            for (const size_t i : {2 * l, 2 * l + 1}) {
                ASSERT_EQ(fsdp.whole(i).dtype, DType::bf16);
                convert(fsdp.whole(i).data, DType::bf16, reinterpret_cast<std::byte*>(params.at(i).data()), DType::f32,
                        fsdp.whole(i).numel());
            }
        };
        converting.forward = [&](size_t l) {
            hooks.forward(l);
            widen(l);
        };
        converting.backward = [&](size_t l) {
            hooks.backward(l);
            widen(l);
        };
        converting.grads_ready = [&](size_t l) {
            for (const size_t i : {2 * l, 2 * l + 1}) {
                convert(reinterpret_cast<std::byte*>(grads.at(i).data()), DType::f32, fsdp.grad(i).data, DType::bf16,
                        fsdp.grad(i).numel());
            }
            hooks.grads_ready(l);
        };
        for (int step = 0; step < training_steps; ++step) {
            std::array<float, 1> loss{Mlp::forward_backward(
                Mlp::batch(static_cast<uint64_t>(step) * batch_size + 30 * static_cast<size_t>(comm.rank()), 30),
                [&](size_t i) { return params.at(i).data(); }, [&](size_t i) { return grads.at(i).data(); }, false,
                converting)};
            fsdp.wait();
            optimizer.step();
            const Tensor tensor = tensor_of(std::span<float>(loss), DType::f32);
            comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::avg});
            ASSERT_NEAR(loss[0], expected[static_cast<size_t>(step)], 2e-2F * expected[static_cast<size_t>(step)]);
        }
    }));
}

TEST(Fsdp, ReplicasTrainAsOneRankDoes) {
    const std::vector<float> expected = losses_alone();
    for (const int shard_ranks : {1, 2, 4}) {
        expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
            expect_close(losses_sharded(comm, {.shard_ranks = shard_ranks}), expected, 1e-4F);
        }));
    }
}

}  // namespace
}  // namespace tsr
