// Gradients reduced into shards: of any dtype, added up over passes and over replicas. Frozen parameters have none.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "mlp.hpp"
#include "optim/adam.hpp"
#include "optim/grad_scaler.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "tensor/convert.hpp"
#include "units.hpp"

namespace tsr {
namespace {

using testing::a_unit_a_layer;
using testing::a_unit_each;
using testing::Cut;
using testing::cut_by;
using testing::cuts;
using ::testing::Each;
using testing::elements_of;
using testing::expect_all_well;
using testing::expect_error;
using testing::FsdpOverWorlds;
using testing::Mlp;
using testing::Model;
using testing::odd_shapes;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::two_units;

// A layer that comes twice, with another between: its second use is the first of backward.
TEST_P(FsdpOverWorlds, BackwardsOfAUnitThatComesTwiceAddUp) {
    const int world = GetParam();
    expect_all_well(run_ranks(world, test_options(), [&](Communicator& comm) {
        Model model = odd_shapes(0);
        for (const Cut& cut : cuts) {
            SCOPED_TRACE(cut.name);
            Fsdp fsdp(shared(comm), cut_by(cut, two_units(model)), {});
            const auto expect_grads = [&](size_t unit, float value) {
                for (const size_t i : fsdp.unit(unit).params) {
                    ASSERT_THAT(fsdp.shard_grad(i).as<float>(), Each(::testing::FloatEq(value)));
                }
            };
            const auto pass = [&](float first_use, float between, float second_use) {
                for (const size_t unit : {0, 1, 0}) {
                    fsdp.forward(unit);
                    fsdp.forward_done(unit);
                }
                const auto backward = [&](size_t unit, float value) {
                    fsdp.backward(unit);
                    for (const size_t i : fsdp.unit(unit).params) {
                        std::ranges::fill(fsdp.grad(i).as<float>(), value);
                    }
                };
                backward(0, second_use);
                fsdp.grads_ready(0);
                backward(1, between);
                fsdp.grads_ready(1);
                backward(0, first_use);
                expect_error([&] { fsdp.wait(); }, Code::invalid_state);  // the second one was not said
                fsdp.grads_ready(0);
                fsdp.wait();
            };
            const auto own = static_cast<float>(comm.rank());
            const auto mean = static_cast<float>(world - 1) / 2;
            for (int step = 0; step < 2; ++step) {  // replaced at each step
                pass(own, 1, 10);
                expect_grads(0, mean + 10);
                expect_grads(1, 1);
            }
            fsdp.set_accumulate(true);
            pass(own, 1, 10);
            expect_grads(0, 2 * (mean + 10));
            expect_grads(1, 2);
            fsdp.set_accumulate(false);
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
            optimizer->add_together({[&](double own, Optimizer::Over how) {
                const Tensor tensor = tensor_of(std::span<double>(&own, 1), DType::f64);
                comm.run({.collective = Collective::all_reduce,
                          .outputs = {&tensor, 1},
                          .op = how == Optimizer::Over::max ? ReduceOp::max : ReduceOp::sum});
                return own;
            }});
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

}  // namespace
}  // namespace tsr
