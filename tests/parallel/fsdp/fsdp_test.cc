#include "parallel/fsdp/fsdp.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "base/clock.hpp"
#include "mlp.hpp"
#include "optim/adam.hpp"
#include "optim/grad_scaler.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "sanitized.hpp"
#include "soon.hpp"
#include "tensor/convert.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Mlp;
using testing::Model;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::test_options;

class FsdpOverWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, FsdpOverWorlds, ::testing::Values(1, 2, 3, 4, 5));

// Of every kind of rows: more than ranks, as many as some worlds have, fewer, none.
Model odd_shapes(int rank) {
    Model model;
    for (const Dims& shape : {Dims{7, 3}, Dims{4}, Dims{1, 5}, Dims{2, 2, 2}, Dims{0, 4}, Dims{30}}) {
        model.add(fmt::format("p{}", model.entries.size()), shape);
        float value = static_cast<float>(1000 * rank + 100 * static_cast<int>(model.entries.size()));
        for (float& v : model.entries.back().values) v = value++;
    }
    return model;
}

std::vector<FsdpUnit> two_units(Model& model) {
    auto params = model.params();
    std::vector<FsdpUnit> units(2);
    units[0].name = "first";
    units[1].name = "second";
    for (size_t i = 0; i < params.size(); ++i) units[i % 2].params.push_back(params[i]);
    return units;
}

// The ways in which units are cut.
struct Cut {
    const char* name;
    int row_block;
    bool flat;
};
constexpr std::array cuts{Cut{"by rows", 0, false}, Cut{"by blocks of 2 rows", 2, false},
                          Cut{"by blocks of 4 rows", 4, false}, Cut{"flat", 0, true}};

std::vector<FsdpUnit> cut_by(const Cut& cut, std::vector<FsdpUnit> units) {
    for (FsdpUnit& unit : units) {
        unit.row_block = cut.row_block;
        unit.flat = cut.flat;
    }
    return units;
}

// The elements of a whole tensor, counted row-major, that a rank has of it, one after the other.
std::vector<size_t> elements_of(const Layout& layout, int rank) {
    std::vector<size_t> elements;
    const Dims& shape = layout.shape();
    for (const Box& box : layout.boxes_of(rank)) {
        for (int64_t i = 0; i < box.numel(); ++i) {
            int64_t rest = i;
            int64_t element = 0;
            int64_t stride = 1;
            for (int d = shape.ndim() - 1; d >= 0; --d) {
                element += (box.offsets[d] + rest % box.sizes[d]) * stride;
                rest /= box.sizes[d];
                stride *= shape[d];
            }
            elements.push_back(static_cast<size_t>(element));
        }
    }
    return elements;
}

std::vector<FsdpUnit> a_unit_a_layer(Model& model) {
    auto params = model.params();
    std::vector<FsdpUnit> units;
    for (size_t l = 0; l < Mlp::layers; ++l) {
        units.push_back({fmt::format("fc{}", l), {params[2 * l], params[2 * l + 1]}, {}, 1});
    }
    return units;
}

// Parameters of one shape, each a unit; their values are their numbers.
Model equal_layers(size_t count, Dims shape = {12, 4}) {
    Model model;
    for (size_t l = 0; l < count; ++l) model.add(fmt::format("w{}", l), shape, static_cast<float>(l));
    return model;
}

std::vector<FsdpUnit> a_unit_each(Model& model, int reshard_after_forward = 1) {
    std::vector<FsdpUnit> units;
    for (const NamedTensor& param : model.params()) {
        units.push_back({.name = "u" + param.name, .params = {param}, .reshard_after_forward = reshard_after_forward});
    }
    return units;
}

TEST_P(FsdpOverWorlds, ShardsAreTheRowsOfRankZerosValues) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        Model model = odd_shapes(comm.rank());
        const Fsdp fsdp(shared(comm), two_units(model), {});
        const Model expected = odd_shapes(0);
        for (size_t i = 0; i < fsdp.params(); ++i) {
            const auto& entry = expected.entries[static_cast<size_t>(fsdp.param(i).name[1] - '0')];
            const Range rows = chunk(entry.shape[0], comm.world_size(), comm.rank());
            const Tensor shard = fsdp.shard(i);
            ASSERT_EQ(shard.shape[0], rows.end - rows.begin);
            const auto boxes = fsdp.held(i).layout.boxes_of(comm.rank());
            if (shard.numel() == 0) continue;
            ASSERT_EQ(boxes.size(), 1U);
            EXPECT_EQ(boxes[0].sizes, shard.shape);
            EXPECT_EQ(boxes[0].offsets[0], rows.begin);
        }
    }));
}

TEST_P(FsdpOverWorlds, HoweverTheyAreCutShardsAreWhatTheirLayoutSaysOfRankZerosValues) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        const Model expected = odd_shapes(0);
        for (const Cut& cut : cuts) {
            SCOPED_TRACE(cut.name);
            for (const bool sync_values : {true, false}) {
                Model model = odd_shapes(sync_values ? comm.rank() : 0);
                const Fsdp fsdp(shared(comm), cut_by(cut, two_units(model)), {.sync_values = sync_values});
                for (size_t i = 0; i < fsdp.params(); ++i) {
                    const auto& entry = expected.entries[static_cast<size_t>(fsdp.param(i).name[1] - '0')];
                    const Layout layout = fsdp.held(i).layout;
                    const auto shard = fsdp.shard(i).as<float>();
                    const std::vector<size_t> elements = elements_of(layout, comm.rank());
                    ASSERT_EQ(shard.size(), elements.size()) << entry.name;
                    for (size_t k = 0; k < shard.size(); ++k) ASSERT_EQ(shard[k], entry.values[elements[k]]);
                    std::vector<size_t> all;  // of all ranks, each once and in order
                    for (int r = 0; r < comm.world_size(); ++r) {
                        const std::vector<size_t> theirs = elements_of(layout, r);
                        all.insert(all.end(), theirs.begin(), theirs.end());
                    }
                    ASSERT_EQ(all.size(), entry.values.size());
                    for (size_t k = 0; k < all.size(); ++k) ASSERT_EQ(all[k], k);
                    for (const Box& box : layout.boxes_of(comm.rank())) {
                        EXPECT_EQ(cut.row_block > 0 ? box.offsets[0] % cut.row_block : 0, 0);
                    }
                }
            }
        }
    }));
}

// A look at all parameters of the unit for each of them takes ten times as long as is allowed here.
TEST(Fsdp, AUnitOfVeryManyParametersIsCutInTheTimeThatTheyTakeOneByOne) {
    constexpr size_t count = testing::sanitized ? 2'000 : 60'000;
    const auto used = [] {
        timespec time{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
    };
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        std::vector<float> values(2 * count, -1);
        if (comm.rank() == 0) std::iota(values.begin(), values.end(), 0.0F);
        FsdpUnit unit;
        unit.name = "many";
        for (size_t i = 0; i < count; ++i) {
            const Tensor param{reinterpret_cast<std::byte*>(&values[2 * i]), Dims{2}, DType::f32, {}};
            unit.params.push_back({fmt::format("p{}", i), param});
        }
        const double before = used();
        const Fsdp fsdp(shared(comm), {unit}, {});
        if (!testing::sanitized) {
            EXPECT_LT(used() - before, 4);
        }
        for (size_t i = 0; i < count; i += 97) {
            EXPECT_EQ(fsdp.shard(i).as<float>()[0], static_cast<float>(2 * i) + static_cast<float>(comm.rank()));
        }
    }));
}

TEST(Fsdp, BlocksThatRanksHaveEquallyManyOfAreARegularLayout) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model;
        model.add("even", {16, 2});
        model.add("uneven", {17, 2});
        const Fsdp fsdp(shared(comm), {{.name = "all", .params = model.params(), .row_block = 4}}, {});
        EXPECT_FALSE(fsdp.held(0).layout.is_explicit());
        EXPECT_TRUE(fsdp.held(1).layout.is_explicit());
    }));
}

TEST(Fsdp, AFlatUnitIsCutEvenlyInTheMiddleOfParameters) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model;
        for (const Dims& shape : {Dims{1, 250}, Dims{}, Dims{3, 50}}) {
            model.add(fmt::format("p{}", model.entries.size()), shape);
        }
        const Fsdp fsdp(shared(comm), {{.name = "all", .params = model.params(), .flat = true}}, {});
        int64_t elements = 0;
        for (size_t i = 0; i < fsdp.params(); ++i) {
            EXPECT_EQ(fsdp.shard(i).shape.ndim(), 1);
            elements += fsdp.shard(i).numel();
        }
        EXPECT_GT(elements, 110);  // of 401
        EXPECT_LT(elements, 180);
    }));
}

TEST_P(FsdpOverWorlds, AUnitIsWholeInItsPassesAtTheSameAddress) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        Model model = odd_shapes(comm.rank());
        const Model expected = odd_shapes(0);
        for (const Cut& cut : cuts) {
            SCOPED_TRACE(cut.name);
            Fsdp fsdp(shared(comm), cut_by(cut, two_units(model)), {});
            std::array<const std::byte*, 6> addresses{};
            const auto check = [&](size_t unit) {
                for (const size_t i : fsdp.unit(unit).params) {
                    const Tensor whole = fsdp.whole(i);
                    const auto& entry = expected.entries[static_cast<size_t>(fsdp.param(i).name[1] - '0')];
                    ASSERT_EQ(whole.shape, entry.shape);
                    if (addresses.at(i) != nullptr) {
                        ASSERT_EQ(whole.data, addresses.at(i));
                    }
                    addresses.at(i) = whole.data;
                    for (size_t k = 0; k < entry.values.size(); ++k) ASSERT_EQ(whole.as<float>()[k], entry.values[k]);
                }
            };
            for (int step = 0; step < 3; ++step) {
                for (const size_t unit : {0, 1}) {
                    fsdp.forward(unit);
                    check(unit);
                    fsdp.forward_done(unit);
                    EXPECT_EQ(fsdp.phase(unit), UnitPhase::sharded);
                }
                for (const size_t unit : {1, 0}) {
                    fsdp.backward(unit);
                    check(unit);
                    for (const size_t i : fsdp.unit(unit).params) fsdp.unused(i);
                    fsdp.grads_ready(unit);
                }
                fsdp.wait();
            }
        }
    }));
}

TEST_P(FsdpOverWorlds, GradientsBecomeTheAverageInTheShards) {
    const int world = GetParam();
    expect_all_well(run_ranks(world, test_options(), [&](Communicator& comm) {
        Model model = odd_shapes(0);
        for (const Cut& cut : cuts) {
            SCOPED_TRACE(cut.name);
            Fsdp fsdp(shared(comm), cut_by(cut, two_units(model)), {});
            for (int step = 0; step < 4; ++step) {
                for (const size_t unit : {0, 1}) {
                    fsdp.forward(unit);
                    fsdp.forward_done(unit);
                }
                for (const size_t unit : {1, 0}) {
                    fsdp.backward(unit);
                    for (const size_t i : fsdp.unit(unit).params) {
                        auto grad = fsdp.grad(i).as<float>();
                        for (size_t k = 0; k < grad.size(); ++k) {
                            grad[k] = static_cast<float>(k) + static_cast<float>(comm.rank() * 2 + step);
                        }
                    }
                    fsdp.grads_ready(unit);
                }
                fsdp.wait();
                for (size_t i = 0; i < fsdp.params(); ++i) {
                    const std::vector<size_t> elements = elements_of(fsdp.held(i).layout, comm.rank());
                    const auto grad = fsdp.shard_grad(i).as<float>();
                    ASSERT_EQ(grad.size(), elements.size());
                    for (size_t k = 0; k < grad.size(); ++k) {
                        ASSERT_FLOAT_EQ(grad[k],
                                        static_cast<float>(elements[k]) + static_cast<float>(world - 1 + step));
                    }
                }
            }
        }
    }));
}

std::vector<OptimizerParam> sharded(const Fsdp& fsdp) {
    std::vector<OptimizerParam> out;
    for (size_t i = 0; i < fsdp.params(); ++i) {
        out.push_back({fsdp.param(i).name, fsdp.shard(i), fsdp.shard_grad(i)});
    }
    return out;
}

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

TEST(Fsdp, AUnitMayHaveOtherDtypesThanTheRest) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        auto units = a_unit_a_layer(model);
        units[1].param_dtype = DType::f32;
        units[2].reduce_dtype = DType::f64;
        Fsdp fsdp(shared(comm), units, {.param_dtype = DType::bf16});
        for (size_t u = 0; u < fsdp.units(); ++u) fsdp.backward(u);
        const DType expected[3][2] = {{DType::bf16, DType::bf16}, {DType::f32, DType::f32}, {DType::bf16, DType::f64}};
        for (size_t i = 0; i < fsdp.params(); ++i) {
            const size_t unit = fsdp.param(i).unit;
            EXPECT_EQ(fsdp.whole(i).dtype, expected[unit][0]) << unit;
            EXPECT_EQ(fsdp.grad(i).dtype, expected[unit][1]) << unit;
            EXPECT_EQ(fsdp.shard(i).dtype, DType::f32);
            fsdp.unused(i);
        }
        // To the bit where the parameters are f32, and finer than bf16 where gradients are f64.
        const auto whole = fsdp.whole(2).as<float>();
        EXPECT_TRUE(std::equal(whole.begin(), whole.end(), model.entries[2].values.begin()));
        fsdp.grad(0).as<uint16_t>()[0] = 0x3f81;  // 1 + 2^-7, of which a quarter more is lost
        fsdp.grad(2).as<float>()[0] = 1.001F * static_cast<float>(comm.rank());
        fsdp.grad(4).as<double>()[0] = 1.001;
        for (size_t u = 0; u < fsdp.units(); ++u) fsdp.grads_ready(u);
        fsdp.wait();
        if (comm.rank() != 0) return;
        EXPECT_EQ(fsdp.shard_grad(0).as<float>()[0], 1.0078125F);
        EXPECT_EQ(fsdp.shard_grad(2).as<float>()[0], 0.5F * 1.001F);
        EXPECT_EQ(fsdp.shard_grad(4).as<float>()[0], 1.001F);
    }));
}

// Of whatever dtype, exactly in each of these.
void fill(const Tensor& tensor, const std::function<float(size_t)>& value) {
    for (size_t k = 0; k < static_cast<size_t>(tensor.numel()); ++k) {
        const float one = value(k);
        convert(reinterpret_cast<const std::byte*>(&one), DType::f32, tensor.data + k * size_of(tensor.dtype),
                tensor.dtype, 1);
    }
}

std::vector<double> doubles(const Tensor& tensor) {
    std::vector<double> values(static_cast<size_t>(tensor.numel()));
    convert(tensor.data, tensor.dtype, reinterpret_cast<std::byte*>(values.data()), DType::f64, tensor.numel());
    return values;
}

// Of integers that bf16 has exactly, as are their sums and averages over 1, 2 and 4 ranks.
TEST(Fsdp, GradientsOfSeveralDtypesInAUnitAreReducedEachInItsOwn) {
    constexpr std::array dtypes{DType::f32, DType::bf16, DType::f64, DType::f16, DType::bf16};
    const auto shape = [](size_t i) { return Dims{static_cast<int64_t>(9 - i), 5}; };
    for (const int world : {1, 2, 4}) {
        for (const std::optional<DType> reduce_dtype : {std::optional<DType>{}, std::optional{DType::f32}}) {
            expect_all_well(run_ranks(world, test_options(), [&](Communicator& comm) {
                for (const Cut& cut : cuts) {
                    SCOPED_TRACE(cut.name);
                    std::vector<std::vector<std::byte>> memory;
                    std::vector<NamedTensor> params;
                    for (size_t i = 0; i < dtypes.size(); ++i) {
                        Tensor tensor{nullptr, shape(i), dtypes.at(i), {}};
                        memory.emplace_back(tensor.size_bytes());
                        tensor.data = memory.back().data();
                        fill(tensor, [&](size_t k) { return static_cast<float>(i + k); });
                        params.push_back({fmt::format("p{}", i), tensor});
                    }
                    const std::vector<FsdpUnit> units{{.name = "all", .params = params}};
                    Fsdp fsdp(shared(comm), cut_by(cut, units), {.reduce_dtype = reduce_dtype});
                    for (const int passes : {1, 2}) {  // what is reduced, and what is added to it
                        fsdp.set_accumulate(passes == 2);
                        fsdp.forward(0);
                        for (size_t i = 0; i < dtypes.size(); ++i) {
                            ASSERT_EQ(fsdp.whole(i).dtype, dtypes.at(i));
                            EXPECT_EQ(doubles(fsdp.whole(i)), doubles(params[i].tensor)) << i;
                        }
                        fsdp.forward_done(0);
                        fsdp.backward(0);
                        for (size_t i = 0; i < dtypes.size(); ++i) {
                            ASSERT_EQ(fsdp.grad(i).dtype, reduce_dtype.value_or(dtypes.at(i)));
                            fill(fsdp.grad(i),
                                 [&](size_t k) { return static_cast<float>((i + k) % 16 + 8 * comm.rank()); });
                        }
                        fsdp.grads_ready(0);
                        fsdp.wait();
                        for (size_t i = 0; i < dtypes.size(); ++i) {
                            ASSERT_EQ(fsdp.shard_grad(i).dtype, dtypes.at(i));
                            const std::vector<size_t> elements = elements_of(fsdp.held(i).layout, comm.rank());
                            const std::vector<double> grad = doubles(fsdp.shard_grad(i));
                            ASSERT_EQ(grad.size(), elements.size());
                            for (size_t k = 0; k < grad.size(); ++k) {
                                const auto average = static_cast<double>((i + elements[k]) % 16 + 4 * (world - 1));
                                ASSERT_EQ(grad[k], passes * average) << name_of(dtypes.at(i)) << " " << k;
                            }
                        }
                    }
                }
            }));
        }
    }
}

#ifndef NDEBUG
// The ranks of a host share the copy, and a view that has ended shows another unit's parameters.
TEST(FsdpDeathTest, InDebugBuildsWholeParametersAreReadOnlyAndGoneAfterwards) {
    ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
    const auto touch = [](bool after) {
        expect_all_well(run_ranks(1, test_options(), [&](Communicator& comm) {
            Model model = Mlp::initial();
            Fsdp fsdp(shared(comm), a_unit_a_layer(model), {});
            fsdp.forward(0);
            volatile float* const whole = fsdp.whole(0).as<float>().data();
            if (whole[0] == Mlp::initial().entries[0].values[0]) std::fputs("it was whole\n", stderr);
            if (after) {
                fsdp.forward_done(0);
                (void)whole[0];
            } else {
                whole[0] = 1;
            }
        }));
        std::_Exit(0);
    };
    // A sanitizer takes the signal, tells of it and exits.
    const auto by_sigsegv = [](int status) {
        return testing::sanitized ? WIFEXITED(status) && WEXITSTATUS(status) != 0
                                  : WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
    };
    const auto told = AllOf(HasSubstr("it was whole"), HasSubstr(testing::sanitized ? "SEGV" : ""));
    EXPECT_EXIT(touch(false), by_sigsegv, told);
    EXPECT_EXIT(touch(true), by_sigsegv, told);
}
#endif

TEST(Fsdp, StepsWithoutSynchronisationAddUpAndSoDoReducedOnes) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {});
        const auto pass = [&](float value, bool add) {
            for (size_t u = 0; u < 3; ++u) {
                fsdp.forward(u);
                fsdp.forward_done(u);
            }
            for (size_t u = 3; u-- > 0;) {
                fsdp.backward(u);
                for (const size_t i : fsdp.unit(u).params) {
                    for (float& g : fsdp.grad(i).as<float>()) g = add ? g + value : value;
                }
                fsdp.grads_ready(u);
            }
            fsdp.wait();
        };
        const auto expect_shards = [&](float value) {
            for (size_t i = 0; i < fsdp.params(); ++i) EXPECT_THAT(fsdp.shard_grad(i).as<float>(), Each(value));
        };
        fsdp.set_sync(false);
        pass(1, true);
        pass(2, true);
        expect_shards(0);
        fsdp.set_sync(true);
        pass(static_cast<float>(4 + comm.rank()), true);
        expect_shards(7.5F);
        pass(5, false);
        expect_shards(5);
        fsdp.set_accumulate(true);
        pass(3, false);
        expect_shards(8);
        fsdp.set_accumulate(false);
        pass(2, false);
        expect_shards(2);
        const auto pass_without = [&] {
            for (size_t u = 3; u-- > 0;) {
                fsdp.backward(u);
                for (const size_t i : fsdp.unit(u).params) fsdp.unused(i);
                fsdp.grads_ready(u);
            }
            fsdp.wait();
        };
        fsdp.set_sync(false);
        pass(static_cast<float>(6 + comm.rank()), true);
        pass_without();
        fsdp.set_sync(true);
        pass_without();
        expect_shards(6.5F);
        pass_without();
        expect_shards(0);
        pass(2, false);
        fsdp.zero_grad();
        expect_shards(0);
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

TEST(Fsdp, ReplicasHoldTheSameShardsAndSaySo) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        Model model = odd_shapes(comm.rank());
        const Fsdp fsdp(shared(comm), two_units(model), {.shard_ranks = 2});
        const Model expected = odd_shapes(0);
        for (size_t i = 0; i < fsdp.params(); ++i) {
            const auto& entry = expected.entries[static_cast<size_t>(fsdp.param(i).name[1] - '0')];
            const Range rows = chunk(entry.shape[0], 2, comm.rank() % 2);
            const int64_t row = entry.shape[0] > 0 ? entry.shape.product() / entry.shape[0] : 0;
            const auto shard = fsdp.shard(i).as<float>();
            ASSERT_EQ(static_cast<int64_t>(shard.size()), (rows.end - rows.begin) * row);
            for (size_t k = 0; k < shard.size(); ++k) {
                ASSERT_EQ(shard[k], entry.values[static_cast<size_t>(rows.begin * row) + k]);
            }
            const Held held = fsdp.held(i);
            EXPECT_EQ(held.layout.replica_count(), 2);
            EXPECT_EQ(held.layout.replica_of(comm.rank()), comm.rank() / 2);
        }
    }));
}

TEST(Fsdp, TheReductionOverReplicasMayWait) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {.shard_ranks = 2});
        const auto pass = [&](float value) {
            for (size_t u = 3; u-- > 0;) {
                fsdp.backward(u);
                for (const size_t i : fsdp.unit(u).params) {
                    for (float& g : fsdp.grad(i).as<float>()) g = value + static_cast<float>(comm.rank());
                }
                fsdp.grads_ready(u);
            }
            fsdp.wait();
        };
        const auto expect_shards = [&](float value) {
            for (size_t i = 0; i < fsdp.params(); ++i) EXPECT_THAT(fsdp.shard_grad(i).as<float>(), Each(value));
        };
        pass(1);
        expect_shards(2.5F);
        fsdp.set_all_reduce(false);
        pass(10);
        pass(20);
        expect_shards(2.5F);
        fsdp.set_all_reduce(true);
        pass(30);
        expect_shards(60 + 4.5F);
        fsdp.set_all_reduce(false);
        pass(100);
        fsdp.zero_grad();
        fsdp.set_all_reduce(true);
        pass(1);
        expect_shards(2.5F);
    }));
}

TEST(Fsdp, WhatIsDividedBeforeIsMadeUpForAfterwards) {
    for (const ReduceOp op : {ReduceOp::avg, ReduceOp::sum}) {
        for (const int shard_ranks : {2, 4}) {
            expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
                Model model = Mlp::initial();
                Fsdp fsdp(shared(comm), a_unit_a_layer(model),
                          {.shard_ranks = shard_ranks, .reduce_dtype = DType::f16, .op = op, .pre_divide = 2});
                for (size_t u = 3; u-- > 0;) {
                    fsdp.backward(u);
                    for (const size_t i : fsdp.unit(u).params) {
                        for (uint16_t& g : fsdp.grad(i).as<uint16_t>())
                            g = 0x7400;  // 16384: four of them are beyond f16
                    }
                    fsdp.grads_ready(u);
                }
                fsdp.wait();
                const float expected = op == ReduceOp::avg ? 16384.0F : INFINITY;
                for (size_t i = 0; i < fsdp.params(); ++i) {
                    EXPECT_THAT(fsdp.shard_grad(i).as<float>(), Each(expected));
                }
            }));
        }
    }
}

// Of one rank, in one element: it is in the shard that has the element, and in no other.
TEST(Fsdp, ANanInAGradientReachesItsOwnersShardAndStopsTheStep) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            Model model;
            model.add("w", {4, 2}, 1);
            Fsdp fsdp(shared(comm), a_unit_each(model), {.reduce_dtype = dtype});
            std::vector<OptimizerParam> params{{"w", fsdp.shard(0), fsdp.shard_grad(0), fsdp.held(0)}};
            const auto optimizer = std::make_shared<Adam>(params, AdamOptions{.lr = 0.5});
            optimizer->set_together([&](double own, Optimizer::Over how) {
                const Tensor tensor = tensor_of(std::span<double>(&own, 1), DType::f64);
                comm.run({.collective = Collective::all_reduce,
                          .outputs = {&tensor, 1},
                          .op = how == Optimizer::Over::max ? ReduceOp::max : ReduceOp::sum});
                return own;
            });
            GradScaler scaler({.init_scale = 4});
            const auto pass = [&](float value) {
                fsdp.backward(0);
                fill(fsdp.grad(0), [&](size_t k) { return k == 5 && comm.rank() == 0 ? value : 8.0F; });
                fsdp.grads_ready(0);
                fsdp.wait();
            };
            pass(std::nanf(""));
            const std::vector<double> grads = doubles(fsdp.shard_grad(0));
            for (size_t k = 0; k < grads.size(); ++k) {
                EXPECT_EQ(std::isnan(grads[k]), comm.rank() == 1 && k == 1) << k;  // which is element 5 of all
            }
            EXPECT_EQ(optimizer->clip_grad_norm(1, 2), INFINITY) << "on every rank";
            EXPECT_FALSE(scaler.step(optimizer));
            scaler.update();
            EXPECT_EQ(scaler.scale(), 2);
            EXPECT_THAT(fsdp.shard(0).as<float>(), Each(1.0F)) << "no rank made the step";
            pass(8);
            EXPECT_TRUE(scaler.step(optimizer));
            EXPECT_THAT(fsdp.shard(0).as<float>(), Each(::testing::FloatNear(0.5F, 1e-5F)));
        }));
    }
}

TEST(Fsdp, FrozenParametersHaveNoGradient) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        auto units = a_unit_a_layer(model);
        units[0].trained = {false, true};
        units[1].trained = {false, false};
        Fsdp fsdp(shared(comm), units, {});
        for (size_t u = 0; u < 3; ++u) {
            fsdp.forward(u);
            fsdp.forward_done(u);
        }
        fsdp.backward(2);
        for (const size_t i : {4, 5}) {
            for (float& g : fsdp.grad(i).as<float>()) g = 1;
        }
        fsdp.grads_ready(2);
        fsdp.backward(0);
        expect_error([&] { (void)fsdp.grad(0); }, Code::invalid_state);
        for (float& g : fsdp.grad(1).as<float>()) g = 2;
        fsdp.grads_ready(0);
        fsdp.wait();
        expect_error([&] { (void)fsdp.shard_grad(0); }, Code::invalid_state);
        EXPECT_THAT(fsdp.shard_grad(1).as<float>(), Each(2.0F));
        EXPECT_THAT(fsdp.shard_grad(5).as<float>(), Each(1.0F));
    }));
}

// --- what is refused

void fill_grads(Fsdp& fsdp, size_t unit, float value) {
    for (const size_t i : fsdp.unit(unit).params) {
        for (float& g : fsdp.grad(i).as<float>()) g = value;
    }
}

void expect_shard_grads(const Fsdp& fsdp, float value) {
    for (size_t i = 0; i < fsdp.params(); ++i) EXPECT_THAT(fsdp.shard_grad(i).as<float>(), Each(value)) << i;
}

TEST(Fsdp, AccessorsRefuseWhatIsNotThere) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {});
        EXPECT_THAT(expect_error([&] { (void)fsdp.whole(0); }, Code::invalid_state).what(),
                    HasSubstr(R"("fc0.weight" is not whole: its unit "fc0" is sharded)"));
        EXPECT_THAT(expect_error([&] { (void)fsdp.grad(0); }, Code::invalid_state).what(), HasSubstr("\"fc0.weight\""));
        expect_error([&] { fsdp.await_unit(1); }, Code::invalid_state);
        expect_error([&] { fsdp.grads_ready(1); }, Code::invalid_state);
        for (const size_t beyond : {size_t{3}, size_t{100}}) {
            expect_error([&] { fsdp.forward(beyond); }, Code::invalid_argument);
            expect_error([&] { fsdp.backward(beyond); }, Code::invalid_argument);
            expect_error([&] { fsdp.unshard(beyond); }, Code::invalid_argument);
        }
        expect_error([&] { (void)fsdp.whole(6); }, Code::invalid_argument);
        EXPECT_THAT(expect_error([&] { fsdp.wait(); }, Code::invalid_state).what(),
                    HasSubstr(R"(3 of 3 units were never said to be ready: "fc0", "fc1", "fc2")"));
        fsdp.unshard(2);
        fsdp.await_unit(2);
        EXPECT_THAT(expect_error([&] { fsdp.check_idle("it cannot be"); }, Code::invalid_state).what(),
                    HasSubstr("it cannot be while unit \"fc2\" is whole"));
        fsdp.reshard(2);
        fsdp.check_idle("it can");
        fsdp.backward(2);
        expect_error([&] { fsdp.forward(0); }, Code::invalid_state);
        expect_error([&] { fsdp.reshard(2); }, Code::invalid_state);
        expect_error([&] { fsdp.set_sync(false); }, Code::invalid_state);
        fill_grads(fsdp, 2, 0);
        fsdp.grads_ready(2);
        expect_error([&] { fsdp.grads_ready(2); }, Code::invalid_state);
        expect_error([&] { fsdp.backward(2); }, Code::invalid_state);
        EXPECT_THAT(expect_error([&] { fsdp.forward(0); }, Code::invalid_state).what(),
                    HasSubstr(R"(the forward of unit "fc0" begins in the middle of a backward, after that of "fc2")"));
    }));
}

TEST(Fsdp, PhasesAreTold) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        auto units = a_unit_a_layer(model);
        units[2].reshard_after_forward = 0;
        Fsdp fsdp(shared(comm), units, {});
        const auto phases = [&] { return std::array{fsdp.phase(0), fsdp.phase(1), fsdp.phase(2)}; };
        constexpr auto sharded = UnitPhase::sharded;
        constexpr auto on_its_way = UnitPhase::on_its_way;
        constexpr auto whole = UnitPhase::whole;
        constexpr auto reducing = UnitPhase::reducing;
        EXPECT_THAT(phases(), Each(sharded));
        fsdp.forward(0);
        EXPECT_THAT(phases(), ElementsAre(whole, on_its_way, sharded));
        fsdp.forward_done(0);
        EXPECT_THAT(phases(), ElementsAre(sharded, on_its_way, sharded));
        fsdp.forward(1);
        fsdp.forward_done(1);
        fsdp.forward(2);
        fsdp.forward_done(2);
        EXPECT_THAT(phases(), ElementsAre(sharded, sharded, whole));
        fsdp.backward(2);
        EXPECT_THAT(phases(), ElementsAre(sharded, on_its_way, UnitPhase::backward));
        fill_grads(fsdp, 2, 0);
        fsdp.grads_ready(2);
        EXPECT_THAT(phases(), ElementsAre(sharded, on_its_way, reducing));
        EXPECT_THAT(expect_error([&] { fsdp.check_idle("it cannot be"); }, Code::invalid_state).what(),
                    HasSubstr("it cannot be while unit \"fc1\" is on its way"));
        for (const size_t unit : {1, 0}) {
            fsdp.backward(unit);
            fill_grads(fsdp, unit, 0);
            fsdp.grads_ready(unit);
        }
        EXPECT_THAT(phases(), Each(reducing));
        EXPECT_THAT(expect_error([&] { fsdp.check_idle("it cannot be"); }, Code::invalid_state).what(),
                    HasSubstr("while the gradients of unit \"fc0\" are being reduced"));
        fsdp.wait();
        EXPECT_THAT(phases(), Each(sharded));
    }));
}

// --- the schedule

std::vector<UnitPhase> phases_of(const Fsdp& fsdp) {
    std::vector<UnitPhase> phases;
    for (size_t u = 0; u < fsdp.units(); ++u) phases.push_back(fsdp.phase(u));
    return phases;
}

TEST(Fsdp, UnitsComeAheadInTheOrderOfTheForwardBefore) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        constexpr auto sharded = UnitPhase::sharded;
        constexpr auto on_its_way = UnitPhase::on_its_way;
        Model model = equal_layers(3);
        Fsdp fsdp(shared(comm), a_unit_each(model), {});
        for (const std::vector<size_t>& order : {std::vector<size_t>{2, 0, 1}, {0, 2, 1}}) {
            for (const bool recorded : {false, true}) {
                std::vector<UnitPhase> expected(3, sharded);
                for (size_t i = 0; i < 3; ++i) {
                    fsdp.forward(order[i]);
                    if (recorded) {  // else some came ahead in the order before
                        expected[order[i]] = UnitPhase::whole;
                        if (i < 2) expected[order[i + 1]] = on_its_way;
                        EXPECT_EQ(phases_of(fsdp), expected) << i;
                    }
                    fsdp.forward_done(order[i]);
                    expected[order[i]] = sharded;
                }
                // The backward goes back over this forward, whatever the one before was.
                for (size_t i = 3; i-- > 0;) {
                    fsdp.backward(order[i]);
                    expected[order[i]] = UnitPhase::backward;
                    if (i > 0) {
                        EXPECT_EQ(fsdp.phase(order[i - 1]), on_its_way) << i;
                        expected[order[i - 1]] = on_its_way;
                    }
                    if (recorded) {
                        EXPECT_EQ(phases_of(fsdp), expected) << i;
                    }
                    fsdp.unused(order[i]);
                    fsdp.grads_ready(order[i]);
                    expected[order[i]] = UnitPhase::reducing;
                }
                fsdp.wait();
            }
        }
    }));
}

TEST(Fsdp, NoMoreUnitsAreAheadThanTheOptionsSay) {
    constexpr size_t count = 6;
    for (const int ahead : {0, 1, 2}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            Model model = equal_layers(count);
            Fsdp fsdp(shared(comm), a_unit_each(model), {.forward_prefetch = ahead, .backward_prefetch = ahead});
            const auto expect_unsharded = [&](size_t left) {
                const auto phases = phases_of(fsdp);
                const auto at_rest = [](UnitPhase p) { return p == UnitPhase::sharded || p == UnitPhase::reducing; };
                const auto unsharded = count - static_cast<size_t>(std::ranges::count_if(phases, at_rest));
                EXPECT_EQ(unsharded, std::min(left, static_cast<size_t>(ahead) + 1)) << left;
            };
            for (int step = 0; step < 2; ++step) {
                for (size_t u = 0; u < count; ++u) {
                    fsdp.forward(u);
                    expect_unsharded(count - u);
                    fsdp.forward_done(u);
                }
                for (size_t u = count; u-- > 0;) {
                    fsdp.backward(u);
                    expect_unsharded(u + 1);
                    fsdp.unused(u);
                    fsdp.grads_ready(u);
                }
                fsdp.wait();
            }
        }));
    }
}

// Rank 1 reduces nothing until rank 0 waits in a backward, which is that of the unit after so many in flight. Units stay
// whole, so that nothing but their gradients needs both ranks.
TEST(Fsdp, ABackwardWaitsWhileAsManyReductionsAreInFlightAsTheOptionsSay) {
    constexpr size_t count = 4;
    for (const size_t in_flight : {1U, 2U, 3U}) {
        std::atomic<bool> waits{false};
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            Model model = equal_layers(count);
            Fsdp fsdp(shared(comm), a_unit_each(model, 0), {.grads_in_flight = static_cast<int>(in_flight)});
            for (const bool held : {false, true}) {  // the first step gets the memory
                for (size_t u = 0; u < count; ++u) {
                    fsdp.forward(u);
                    fsdp.forward_done(u);
                }
                if (held && comm.rank() == 1) testing::await_call(waits);
                for (size_t done = 0; done < count; ++done) {
                    const size_t unit = count - 1 - done;
                    if (held && comm.rank() == 0 && done == in_flight) {
                        const testing::CallInInterrupt noticed([] {}, waits);
                        fsdp.backward(unit);
                        EXPECT_TRUE(waits) << "it waited";
                    } else {
                        fsdp.backward(unit);
                    }
                    for (float& g : fsdp.grad(unit).as<float>()) g = static_cast<float>(unit) + (held ? 10.0F : 20.0F);
                    fsdp.grads_ready(unit);
                }
                fsdp.wait();
                for (size_t u = 0; u < count; ++u) {
                    EXPECT_THAT(fsdp.shard_grad(u).as<float>(), Each(static_cast<float>(u) + (held ? 10.0F : 20.0F)));
                }
            }
        }));
    }
}

// The second unit is the larger one, so that it never lies in the first one's memory, which rank 0 gives back earlier.
TEST(Fsdp, AUnitBecomesWholeWhileAReductionWaitsForAnotherRank) {
    std::atomic<bool> is_whole{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = equal_layers(1);
        model.add("large", {5000, 2}, 7);
        Fsdp fsdp(shared(comm), a_unit_each(model), {.backward_prefetch = 0});
        fsdp.backward(0);
        for (float& g : fsdp.grad(0).as<float>()) g = static_cast<float>(comm.rank() + 1);
        if (comm.rank() == 0) fsdp.grads_ready(0);
        fsdp.unshard(1);
        fsdp.await_unit(1);
        EXPECT_THAT(fsdp.whole(1).as<float>(), Each(7.0F));
        if (comm.rank() == 0) {
            is_whole = true;
        } else {
            wait_until([&] { return is_whole.load(); }, testing::soon(), "rank 0's whole unit");
            fsdp.grads_ready(0);
        }
        fsdp.backward(1);
        fsdp.unused(1);
        fsdp.grads_ready(1);
        fsdp.wait();
        EXPECT_THAT(fsdp.shard_grad(0).as<float>(), Each(1.5F));
    }));
}

TEST(Fsdp, ARankThatLeavesOutTheBackwardOfAUnitIsNamedAtTheDeadline) {
    std::atomic<int> told{0};
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        Model model = equal_layers(2);
        comm.set_timeout(milliseconds{1000});
        Fsdp fsdp(shared(comm), a_unit_each(model), {});
        const auto backward = [&](size_t unit) {
            fsdp.backward(unit);
            fsdp.unused(unit);
            fsdp.grads_ready(unit);
        };
        backward(1);
        if (comm.rank() == 1) {
            EXPECT_THAT(expect_error([&] { fsdp.wait(); }, Code::invalid_state).what(), HasSubstr("\"uw0\""));
            wait_until([&] { return told.load() == 2; }, testing::soon(), "the others' errors");
            return;
        }
        const Error error = expect_error(
            [&] {
                backward(0);
                fsdp.wait();
            },
            Code::timeout);
        EXPECT_THAT(error.what(), HasSubstr("rank 1"));
        ++told;
    }));
}

// Which page of which shared memory an address shows, as the kernel tells it.
std::string page_of(const void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        std::istringstream fields(line);
        uintptr_t begin = 0;
        uintptr_t end = 0;
        uintptr_t offset = 0;
        uint64_t inode = 0;
        char dash = 0;
        std::string rights;
        std::string device;
        fields >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> std::dec >> inode;
        if (begin <= at && at < end) return fmt::format("{} of {} on {}", offset + (at - begin), inode, device);
    }
    throw std::runtime_error("nothing is mapped there");
}

// Rank 1 goes on to the second unit, in the memory of the first, which rank 0 still uses.
TEST(Fsdp, MemoryIsAnotherUnitsWhenAllRanksOfTheHostHaveLetGoOfIt) {
    std::atomic<int> asked{0};  // how often rank 1 was asked, as it waits, whether to go on
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = equal_layers(2, {4096, 4});
        Fsdp fsdp(shared(comm), a_unit_each(model), {});
        fsdp.unshard(0);
        fsdp.await_unit(0);
        const std::string first = page_of(fsdp.whole(0).data);
        if (comm.rank() == 1) {
            fsdp.reshard(0);
            fsdp.unshard(1);
            set_interrupt(
                [](void* count) {
                    ++*static_cast<std::atomic<int>*>(count);
                    return int32_t{0};
                },
                &asked);
            fsdp.await_unit(1);
            set_interrupt(nullptr, nullptr);
        } else {
            // Long enough for the second unit's rows to be copied, were that not to wait for this rank.
            wait_until([&] { return asked.load() >= 5; }, testing::soon(), "rank 1 waiting");
            EXPECT_THAT(fsdp.whole(0).as<float>(), Each(0.0F));
            fsdp.reshard(0);
            fsdp.unshard(1);
            fsdp.await_unit(1);
        }
        EXPECT_EQ(page_of(fsdp.whole(1).data), first) << "it is the same memory";
        EXPECT_THAT(fsdp.whole(1).as<float>(), Each(1.0F));
        fsdp.reshard(1);
    }));
}

TEST(Fsdp, AStepMayBeAbandonedAnywhere) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = odd_shapes(0);
        Fsdp fsdp(shared(comm), two_units(model), {});
        const std::vector<std::function<void()>> calls{
            [&] { fsdp.forward(0); },      [&] { fsdp.forward_done(0); }, [&] { fsdp.forward(1); },
            [&] { fsdp.forward_done(1); }, [&] { fsdp.backward(1); },     [&] { fill_grads(fsdp, 1, 3); },
            [&] { fsdp.grads_ready(1); },  [&] { fsdp.backward(0); },     [&] { fill_grads(fsdp, 0, 3); },
            [&] { fsdp.grads_ready(0); },  [&] { fsdp.wait(); }};
        for (const bool sync : {true, false}) {
            for (size_t end = 0; end <= calls.size(); ++end) {
                fsdp.set_sync(sync);
                for (size_t c = 0; c < end; ++c) calls[c]();
                fsdp.abandon();
                fsdp.check_idle("nothing can be");
                expect_shard_grads(fsdp, 0);
                fsdp.set_sync(true);
                for (const auto& call : calls) call();
                expect_shard_grads(fsdp, 3);
            }
        }
    }));
}

// Memory of gradients goes from unit to unit: what nobody wrote would be another's.
TEST(Fsdp, AGradientThatWasNotWrittenIsNamed) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            Model model = Mlp::initial();
            Fsdp fsdp(shared(comm), a_unit_a_layer(model), {.grads_in_flight = 1, .reduce_dtype = dtype});
            const auto write = [&](size_t param) {
                const Tensor grad = fsdp.grad(param);
                std::memset(grad.data, 0, grad.size_bytes());
            };
            for (int step = 0; step < 2; ++step) {
                for (const size_t unit : {2, 1, 0}) {
                    const auto& params = fsdp.unit(unit).params;
                    fsdp.backward(unit);
                    EXPECT_THAT(
                        expect_error([&] { fsdp.grads_ready(unit); }, Code::invalid_state).what(),
                        HasSubstr(fmt::format(
                            R"(2 of 2 gradients of unit "fc{0}" were not written: "fc{0}.weight", "fc{0}.bias")",
                            unit)));
                    write(params[0]);
                    EXPECT_THAT(expect_error([&] { fsdp.grads_ready(unit); }, Code::invalid_state).what(),
                                HasSubstr(fmt::format(
                                    R"(1 of 2 gradients of unit "fc{0}" were not written: "fc{0}.bias";)", unit)));
                    fsdp.unused(params[1]);
                    fsdp.grads_ready(unit);
                }
                fsdp.wait();
                expect_shard_grads(fsdp, 0);
            }
            fsdp.set_sync(false);  // zeros, to which nothing may be added
            fsdp.backward(2);
            fsdp.grads_ready(2);
            fsdp.wait();
            fsdp.set_sync(true);
            fsdp.backward(2);
            fsdp.grads_ready(2);
        }));
    }
}

// Rank 1 comes late to a call until rank 0 was interrupted in it.
TEST(Fsdp, WhatWasInterruptedGoesOn) {
    std::atomic<int> interrupts{0};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = odd_shapes(0);
        Fsdp fsdp(shared(comm), two_units(model), {.grads_in_flight = 1});
        const auto late = [&] {
            if (comm.rank() == 0) return;
            const int before = interrupts;
            wait_until([&] { return interrupts > before; }, testing::soon(), "an interrupt");
        };
        const auto call = [&](const std::function<void()>& what) {
            if (comm.rank() == 1) return what();
            while (true) {
                try {
                    set_interrupt([](void*) { return int32_t{1}; }, nullptr);
                    what();
                    return set_interrupt(nullptr, nullptr);
                } catch (const Error& error) {
                    set_interrupt(nullptr, nullptr);
                    if (error.code() != Code::interrupted) throw;
                    ++interrupts;
                }
            }
        };
        for (int step = 0; step < 2; ++step) {  // the first one allocates
            late();
            call([&] { fsdp.forward(0); });
            call([&] { fsdp.forward_done(0); });
            call([&] { fsdp.forward(1); });
            call([&] { fsdp.forward_done(1); });
            late();
            call([&] { fsdp.backward(1); });
            EXPECT_EQ(fsdp.phase(1), UnitPhase::backward);
            EXPECT_FLOAT_EQ(fsdp.whole(fsdp.unit(1).params[0]).as<float>()[0], 200);
            fill_grads(fsdp, 1, static_cast<float>(comm.rank() + step));
            late();  // for the memory that it gives back
            call([&] { fsdp.grads_ready(1); });
            call([&] { fsdp.backward(0); });
            fill_grads(fsdp, 0, static_cast<float>(comm.rank() + step));
            late();
            call([&] { fsdp.grads_ready(0); });
            call([&] { fsdp.wait(); });
            expect_shard_grads(fsdp, 0.5F + static_cast<float>(step));
        }
        call([&] { fsdp.backward(1); });
        fill_grads(fsdp, 1, 3);
        late();
        call([&] { fsdp.grads_ready(1); });
        call([&] { fsdp.abandon(); });
        expect_shard_grads(fsdp, 0);
        late();
        call([&] { fsdp.unshard(1); });
        call([&] { fsdp.reshard(1); });
    }));
    EXPECT_GE(interrupts, 10);
}

TEST(Fsdp, RanksThatMakeDifferentUnitsWholeAreNamed) {
    const Outcomes outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {.forward_prefetch = 0});
        fsdp.forward(comm.rank() == 2 ? 1 : 0);
    });
    size_t named = 0;
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        const std::string what = outcome->what();
        if (outcome->code() == Code::mismatch) {
            EXPECT_THAT(what, HasSubstr("\"fc0\""));
            EXPECT_THAT(what, HasSubstr("\"fc1\""));
            ++named;
        } else {
            EXPECT_EQ(outcome->code(), Code::aborted) << what;
        }
    }
    EXPECT_GT(named, 0U);
}

TEST(Fsdp, DifferentModelsAreRefusedByName) {
    const std::vector<std::pair<std::function<void(std::vector<FsdpUnit>&)>, std::string>> cases{
        {[](auto& units) { units[1].name = "other"; }, "unit \"other\" of 2 parameters"},
        {[](auto& units) { units[1].params.pop_back(); }, "unit \"fc1\" of 1 parameters"},
        {[](auto& units) { units[1].reshard_after_forward = 0; }, "reshard_after_forward 0"},
        {[](auto& units) { units[1].param_dtype = DType::f16; }, "param_dtype f16"},
        {[](auto& units) { units[2].reduce_dtype = DType::f64; }, "reduce_dtype f64"},
        {[](auto& units) { units[1].trained = {true, false}; }, "\"fc1.bias\" is not trained"},
        {[](auto& units) { units[2].params[0].name = "renamed"; }, "\"renamed\""}};
    for (const auto& [change, said] : cases) {
        for (const auto& outcome : run_ranks(2, test_options(), [&, &change = change](Communicator& comm) {
                 Model model = Mlp::initial();
                 auto units = a_unit_a_layer(model);
                 if (comm.rank() == 1) change(units);
                 const Fsdp fsdp(shared(comm), units, {});
             })) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::mismatch);
            EXPECT_THAT(outcome->what(), HasSubstr(said));
        }
    }
}

// The others would wait for it until their deadline.
TEST(Fsdp, WhatOneRankAloneRegistersBadlyIsToldToAll) {
    struct Bad {
        std::function<void(std::vector<FsdpUnit>&, FsdpOptions&)> change;
        std::string said;
    };
    const std::vector<Bad> cases{
        {[](auto& units, auto&) { units[1].name = "fc0"; }, "two units are named \"fc0\""},
        {[](auto& units, auto&) { units[1].params[0] = units[0].params[0]; },
         "two parameters are named \"fc0.weight\""},
        {[](auto& units, auto&) { units[2].row_block = -7; }, "unit \"fc2\": row_block is -7"},
        {[](auto& units, auto&) { units.clear(); }, "a model without units"},
        {[](auto& units, auto&) { units[0].params[1].tensor.dtype = DType::i64; }, "\"fc0.bias\" is i64"},
        {[](auto&, auto& options) { options.grads_in_flight = 0; }, "grads_in_flight is 0"}};
    for (const auto& [change, said] : cases) {
        for (const int bad : {0, 1}) {
            expect_all_well(run_ranks(3, test_options(), [&, &change = change, &said = said](Communicator& comm) {
                Model model = Mlp::initial();
                auto units = a_unit_a_layer(model);
                FsdpOptions options;
                if (comm.rank() == bad) change(units, options);
                const Error error =
                    expect_error([&] { const Fsdp fsdp(shared(comm), units, options); }, Code::invalid_argument);
                EXPECT_THAT(error.what(), HasSubstr(said));
                if (comm.rank() != bad) {
                    EXPECT_THAT(error.what(), HasSubstr(fmt::format("rank {}: ", bad)));
                    EXPECT_EQ(error.record()->peer, bad);
                }
                const Fsdp another(shared(comm), a_unit_a_layer(model), {});  // nothing else has happened
            }));
        }
    }
}

TEST(Fsdp, OfSeveralBadRegistrationsTheFirstRanksIsToldToTheRest) {
    const auto outcomes = run_ranks(4, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        auto units = a_unit_a_layer(model);
        if (comm.rank() == 1) units[0].name = "other";  // which differs, but that is not what is told
        if (comm.rank() >= 2) units[0].row_block = -comm.rank();
        const Fsdp fsdp(shared(comm), units, {});
    });
    const std::array<std::string, 4> said{"rank 2: unit \"fc0\": row_block is -2",
                                          "rank 2: unit \"fc0\": row_block is -2", "row_block is -2",
                                          "row_block is -3"};
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
        ASSERT_TRUE(outcomes[rank]);
        EXPECT_EQ(outcomes[rank]->code(), Code::invalid_argument);
        EXPECT_THAT(outcomes[rank]->what(), HasSubstr(said.at(rank))) << rank;
    }
}

TEST(Fsdp, RanksOfWhichSomeTrainUnderDdpAreTold) {
    for (const auto& outcome : run_ranks(2, test_options(), [](Communicator& comm) {
             Model model = Mlp::initial();
             const auto units = a_unit_a_layer(model);
             if (comm.rank() == 0) {
                 const Ddp ddp(shared(comm), units[0].params, {});
             } else {
                 const Fsdp fsdp(shared(comm), units, {});
             }
         })) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 has FSDP, rank 0 has DDP"));
    }
}

TEST(Fsdp, BadRegistrationsAreRefused) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        const auto refused = [&](const std::function<void(std::vector<FsdpUnit>&, FsdpOptions&)>& change) {
            Model model = Mlp::initial();
            auto units = a_unit_a_layer(model);
            FsdpOptions options;
            change(units, options);
            return std::string(
                expect_error([&] { const Fsdp fsdp(shared(comm), units, options); }, Code::invalid_argument).what());
        };
        EXPECT_THAT(refused([](auto& units, auto&) { units.clear(); }), HasSubstr("without units"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].params.clear(); }), HasSubstr("\"fc1\" has no param"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[2].name = "fc0"; }),
                    HasSubstr("two units are named \"fc0\""));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].params[0] = units[0].params[0]; }),
                    HasSubstr("two parameters are named \"fc0.weight\""));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].params[0].tensor.shape = {}; }), HasSubstr("shape [1]"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].reshard_after_forward = 2; }),
                    HasSubstr("unit \"fc1\": reshard_after_forward is 2; it is 0, 1, or a number of which 1 ranks"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].row_block = -1; }),
                    HasSubstr("unit \"fc1\": row_block is -1"));
        EXPECT_THAT(refused([](auto& units, auto&) {
                        units[1].row_block = 2;
                        units[1].flat = true;
                    }),
                    HasSubstr("unit \"fc1\" is flat"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.op = ReduceOp::max; }), HasSubstr("AVG or SUM"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.param_dtype = DType::i32; }), HasSubstr("param_dtype"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].reduce_dtype = DType::boolean; }),
                    HasSubstr("unit \"fc1\": reduce_dtype is bool"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.forward_prefetch = -1; }), HasSubstr("at least 0"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.grads_in_flight = 0; }), HasSubstr("at least 1"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.shard_ranks = 2; }), HasSubstr("no multiple"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.pre_divide = 0; }), HasSubstr("above 0"));
    }));
}

TEST(Fsdp, ARankThatGivesUpEndsTheWaitsOfAll) {
    const Outcomes outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {});
        Adam optimizer(sharded(fsdp), {});
        optimizer.set_gate([&] { fsdp.check_idle("the optimizer cannot change the shards"); });
        fsdp.forward(0);
        if (comm.rank() == 1) return comm.abort("rank 1 gives up");
        const Error first = expect_error(
            [&] {
                for (size_t u = 0; u < 3; ++u) {
                    fsdp.forward(u);
                    fsdp.forward_done(u);
                }
                for (size_t u = 3; u-- > 0;) {
                    fsdp.backward(u);
                    fsdp.grads_ready(u);
                }
                fsdp.wait();
            },
            Code::aborted);
        EXPECT_THAT(first.what(), HasSubstr("rank 1 gives up"));
        for (const auto& call : std::vector<std::function<void()>>{
                 [&] { fsdp.forward(0); }, [&] { fsdp.backward(0); }, [&] { fsdp.wait(); }, [&] { fsdp.zero_grad(); },
                 [&] { fsdp.unshard(1); }, [&] { optimizer.step(); }}) {
            const Error later = expect_error(call, Code::aborted);
            ASSERT_NE(later.record()->cause, nullptr);
        }
    });
    expect_all_well(outcomes);
}

}  // namespace
}  // namespace tsr
