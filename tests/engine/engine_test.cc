// An engine's training equals that of one rank alone, at every stage, with accumulation, in any division of the batch.
#include "engine/engine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "optim/adagrad.hpp"
#include "optim/adam.hpp"
#include "optim/lamb.hpp"
#include "optim/lion.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "toy.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::Params;
using testing::pass_with;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::Toy;
using testing::values_of;

using Values = std::vector<std::vector<double>>;  // by parameter

// One rank alone: the whole batch in one pass, clipped, then a step.
template <class Kind = Adam, class Options>
Values reference(int steps, uint64_t batch, double clipping, const Options& options) {
    Params<double> params = Toy::initial(1);
    std::vector<OptimizerParam> list;
    Values grads;
    for (auto& unit : params.in_units()) {
        for (auto& param : unit.params) list.push_back({param.name, param.tensor, param.tensor});
    }
    for (const OptimizerParam& param : list) grads.emplace_back(static_cast<size_t>(param.value.numel()));
    for (size_t i = 0; i < list.size(); ++i) list[i].grad.data = reinterpret_cast<std::byte*>(grads[i].data());
    Kind optimizer(list, options);
    for (int step = 0; step < steps; ++step) {
        Toy::run(
            static_cast<uint64_t>(step) * batch, batch, 1, false,
            [&](size_t i) { return list[i].value.as<double>().data(); }, [&](size_t i) { return grads[i].data(); }, {});
        (void)optimizer.clip_grad_norm(clipping, 2);
        optimizer.step();
    }
    Values out;
    for (const OptimizerParam& param : list) {
        const auto values = param.value.as<double>();
        out.emplace_back(values.begin(), values.end());
    }
    return out;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& wanted, double relative) {
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_NEAR(found[i], wanted[i], relative * std::max(std::abs(wanted[i]), 1e-3)) << "element " << i;
    }
}

std::string config_of(int stage, int accumulation, int micro, const std::string& type = "Adam") {
    return fmt::format(R"({{"train_micro_batch_size_per_gpu": {}, "gradient_accumulation_steps": {},
        "optimizer": {{"type": "{}", "params": {{"lr": 0.02, "weight_decay": 0.1}}}},
        "zero_optimization": {{"stage": {}}}}})",
                       micro, accumulation, type, stage);
}

constexpr AdamOptions same_adam{.lr = 0.02, .weight_decay = 0.1, .decay = Decay::decoupled};

// Trains with each rank's share of the batch in `accumulation` passes.
Values trained(Engine& engine, const Communicator& comm, int steps) {
    const auto [train, micro, accumulation] = engine.batch();
    for (int step = 0; step < steps; ++step) {
        for (int64_t pass = 0; pass < accumulation; ++pass) {
            const int64_t begin = step * train + (pass * comm.world_size() + comm.rank()) * micro;
            Toy::pass(engine, static_cast<uint64_t>(begin), static_cast<uint64_t>(micro));
            EXPECT_EQ(engine.step(), pass + 1 == accumulation);
        }
    }
    Values out;
    for (size_t i = 0; i < engine.model().params(); ++i) out.push_back(values_of<double>(engine, i));
    return out;
}

// How many passes were reduced.
int64_t reductions_of(const Engine& engine) {
    const auto ddp = engine.model().ddp();
    return ddp ? ddp->synced_steps() : engine.model().fsdp()->synced_steps();
}

class EngineAtStages : public ::testing::TestWithParam<int> {};

TEST_P(EngineAtStages, TrainsAsOneRankAloneDoes) {
    constexpr int steps = 20;
    const Values wanted = reference(steps, 24, 1.0, same_adam);
    for (const auto& [world, accumulation, micro] : {std::tuple{1, 2, 12}, std::tuple{3, 1, 8}, std::tuple{4, 3, 2}}) {
        SCOPED_TRACE(fmt::format("{} ranks, accumulation {}", world, accumulation));
        expect_all_well(
            run_ranks(world, test_options(), [&, accumulation = accumulation, micro = micro](Communicator& comm) {
                Params<double> params = Toy::initial(static_cast<uint64_t>(comm.rank() + 1));  // rank 0's count
                Engine engine(shared(comm), params.in_units(), config_of(GetParam(), accumulation, micro));
                const Values found = trained(engine, comm, steps);
                for (size_t i = 0; i < found.size(); ++i) expect_near(found[i], wanted[i], 1e-10);
                EXPECT_EQ(engine.counters().global_steps, steps);
                EXPECT_EQ(engine.counters().global_samples, steps * 24);
                EXPECT_EQ(engine.counters().micro_steps, steps * accumulation);
                EXPECT_EQ(engine.counters().skipped_steps, 0);
            }));
    }
}

TEST_P(EngineAtStages, EveryOptimizerTrainsAsOneRankAloneDoes) {
    constexpr int steps = 5;
    const std::vector<std::pair<std::string, Values>> all{
        {"Adagrad", reference<Adagrad>(steps, 24, 1.0, AdagradOptions{.lr = 0.02, .weight_decay = 0.1})},
        {"Lion", reference<Lion>(steps, 24, 1.0, LionOptions{.lr = 0.02, .weight_decay = 0.1})},
        {"Lamb", reference<Lamb>(steps, 24, 1.0, LambOptions{.lr = 0.02, .weight_decay = 0.1})}};
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        for (const auto& [type, wanted] : all) {
            SCOPED_TRACE(type);
            Params<double> params = Toy::initial(1);
            Engine engine(shared(comm), params.in_units(), config_of(GetParam(), 2, 4, type));
            const Values found = trained(engine, comm, steps);
            for (size_t i = 0; i < found.size(); ++i) expect_near(found[i], wanted[i], 1e-10);
        }
    }));
}

TEST_P(EngineAtStages, FourMicroBatchesEqualABigOne) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        const auto run = [&](int accumulation, int micro) {
            Params<double> params = Toy::initial(1);
            Engine engine(shared(comm), params.in_units(), config_of(GetParam(), accumulation, micro));
            for (int64_t pass = 0; pass < accumulation; ++pass) {
                // The samples of a rank are the same ones for each accumulation.
                Toy::pass(engine, static_cast<uint64_t>(comm.rank() * 8 + pass * micro), static_cast<uint64_t>(micro));
                (void)engine.step();
            }
            Values out{{engine.grad_norm().value()}};
            for (size_t i = 0; i < Toy::count; ++i) out.push_back(values_of<double>(engine, i));
            return out;
        };
        const Values big = run(1, 8);
        const Values small = run(4, 2);
        for (size_t i = 0; i < big.size(); ++i) expect_near(small[i], big[i], 1e-12);
    }));
}

// Gradients whose sums are exact.
TEST_P(EngineAtStages, AccumulatesTheSameBits) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        const auto run = [&](int accumulation, const std::function<double(int pass)>& gradient) {
            Params<double> params;
            params.add(0, "w", {7}, 1.0);
            params.add(0, "scalar", {}, 2.0);
            Engine engine(shared(comm), params.in_units(),
                          fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": {},
                              "gradient_clipping": 0, "optimizer": {{"type": "SGD", "params": {{"lr": 0.5}}}},
                              "zero_optimization": {{"stage": {}}}}})",
                                      accumulation, GetParam()));
            for (int pass = 0; pass < accumulation; ++pass) {
                EXPECT_EQ(engine.adds_gradients(), pass > 0 && GetParam() < 2);
                EXPECT_EQ(engine.is_boundary(), pass + 1 == accumulation);
                pass_with<double>(engine, [&](size_t, std::span<double> grad) {
                    for (double& g : grad) g = gradient(pass) * engine.loss_factor();
                });
                EXPECT_EQ(reductions_of(engine), GetParam() >= 2 ? pass + 1 : pass + 1 == accumulation ? 1 : 0);
                (void)engine.step();
            }
            return Values{values_of<double>(engine, 0), values_of<double>(engine, 1)};
        };
        const double rank = comm.rank();
        const Values one = run(1, [&](int) { return (1 + 2 + 3 + 4) / 4.0 + rank; });
        const Values four = run(4, [&](int pass) { return pass + 1 + rank; });
        EXPECT_EQ(one, (Values{std::vector<double>(7, 1 - 0.5 * 3), {2 - 0.5 * 3}}));
        EXPECT_EQ(four, one);
    }));
}

TEST_P(EngineAtStages, ClipsToANormOfOneByDefault) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        const auto run = [&](const std::string& clipping) {
            Params<double> params;
            params.add(0, "w", {2}, 0.0);
            Engine engine(
                shared(comm), params.in_units(),
                fmt::format(R"({{"train_batch_size": 2, {} "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}},
                              "zero_optimization": {{"stage": {}}}}})",
                            clipping, GetParam()));
            EXPECT_EQ(engine.grad_norm(), std::nullopt);
            pass_with<double>(engine, [](size_t, std::span<double> grad) {
                grad[0] = 3;
                grad[1] = 4;
            });
            EXPECT_TRUE(engine.step());
            EXPECT_DOUBLE_EQ(engine.grad_norm().value(), 5);
            return values_of<double>(engine, 0);
        };
        expect_near(run(""), {-0.6, -0.8}, 1e-6);
        expect_near(run("\"gradient_clipping\": 2.5,"), {-1.5, -2}, 1e-6);
        EXPECT_EQ(run("\"gradient_clipping\": 0,"), (std::vector<double>{-3, -4}));
        EXPECT_EQ(run("\"gradient_clipping\": 9,"), (std::vector<double>{-3, -4}));
    }));
}

// Rank 1 alone lacks the gradient of "b"; it counts as zeros there.
TEST_P(EngineAtStages, AMissingGradientCountsAsZeros) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Params<double> params;
        params.add(0, "a", {5}, 0.0);
        params.add(0, "b", {3}, 0.0);
        Engine engine(shared(comm), params.in_units(),
                      fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                          "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}}, "zero_optimization": {{"stage": {}}}}})",
                                  GetParam()));
        for (int step = 1; step <= 2; ++step) {
            engine.forward(0);
            engine.forward_done(0);
            engine.backward(0);
            for (size_t i = 0; i < 2; ++i) {
                if (i == 1 && comm.rank() == 1) continue;
                for (double& g : engine.model().grad(i).as<double>()) g = 2;
                engine.ready(i);
            }
            engine.backward_done();
            EXPECT_TRUE(engine.step());
            EXPECT_EQ(values_of<double>(engine, 0), std::vector<double>(5, -2.0 * step));
            EXPECT_EQ(values_of<double>(engine, 1), std::vector<double>(3, -1.0 * step));
        }
    }));
}

// Rank 1 lacks the gradient in the second of two passes: what the first one had stays.
TEST_P(EngineAtStages, AMissingGradientKeepsWhatAccumulated) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Params<double> params;
        params.add(0, "w", {5}, 0.0);
        Engine engine(shared(comm), params.in_units(),
                      fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
                          "gradient_clipping": 0, "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}},
                          "zero_optimization": {{"stage": {}}}}})",
                                  GetParam()));
        pass_with<double>(engine, [](size_t, std::span<double> grad) { std::ranges::fill(grad, 2); });
        EXPECT_FALSE(engine.step());
        if (comm.rank() == 0) {
            pass_with<double>(engine, [](size_t, std::span<double> grad) { std::ranges::fill(grad, 2); });
        } else {
            engine.forward(0);
            engine.forward_done(0);
            engine.backward(0);
            engine.backward_done();
        }
        EXPECT_TRUE(engine.step());
        EXPECT_EQ(values_of<double>(engine, 0), std::vector<double>(5, -3));  // the mean of 4 and 2
    }));
}

TEST_P(EngineAtStages, WithoutFillingAMissingGradientIsAnError) {
    expect_all_well(run_ranks(1, test_options(), [&](Communicator& comm) {
        Params<double> params = Toy::initial(1);
        Engine engine(shared(comm), params.in_units(),
                      fmt::format(R"({{"train_batch_size": 1, "optimizer": {{"type": "SGD"}},
                          "zero_optimization": {{"stage": {}, "ignore_unused_parameters": false}}}})",
                                  GetParam()));
        for (size_t unit = 0; unit < 2; ++unit) {
            engine.forward(unit);
            engine.forward_done(unit);
        }
        engine.backward(1);
        for (double& g : engine.model().grad(3).as<double>()) g = 1;
        engine.ready(3);
        (void)testing::expect_error([&] { engine.backward_done(); }, Code::invalid_state);
    }));
}

// Every way to divide the gradients by the number of ranks gives their mean.
TEST_P(EngineAtStages, DividesAsTheConfigurationSays) {
    const std::vector<std::pair<std::string, double>> cases{{"", 2.0},
                                                            {R"("prescale_gradients": true,)", 2.0},
                                                            {R"("gradient_predivide_factor": 4,)", 2.0},
                                                            {R"("gradient_allreduce_op": "sum",)", 4.0}};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        for (const auto& [option, gradient] : cases) {
            if (GetParam() == 3 && gradient == 4.0) continue;  // is refused
            Params<double> params;
            params.add(0, "w", {5}, 0.0);
            Engine engine(shared(comm), params.in_units(),
                          fmt::format(R"({{"train_batch_size": 2, {} "gradient_clipping": 0,
                              "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}}, "zero_optimization": {{"stage": {}}}}})",
                                      option, GetParam()));
            pass_with<double>(engine, [&](size_t, std::span<double> grad) {
                for (double& g : grad) g = 1 + 2 * comm.rank();
            });
            EXPECT_TRUE(engine.step());
            EXPECT_EQ(values_of<double>(engine, 0), std::vector<double>(5, -gradient)) << option;
        }
    }));
}

// Sums that f64 cannot hold, unless each rank divides first.
TEST_P(EngineAtStages, DividesBeforeTheSumIfTheConfigurationSays) {
    constexpr double large = 1.5e308;
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        for (const char* option : {"", R"("prescale_gradients": true,)", R"("gradient_predivide_factor": 2,)"}) {
            Params<double> params;
            params.add(0, "w", {5}, 0.0);
            Engine engine(shared(comm), params.in_units(),
                          fmt::format(R"({{"train_batch_size": 2, {} "gradient_clipping": 0,
                              "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}}, "zero_optimization": {{"stage": {}}}}})",
                                      option, GetParam()));
            pass_with<double>(engine, [&](size_t, std::span<double> grad) { std::ranges::fill(grad, large); });
            EXPECT_TRUE(engine.step());
            const bool divides = *option != '\0';
            EXPECT_EQ(values_of<double>(engine, 0)[0], divides ? -large : -HUGE_VAL) << option;
        }
    }));
}

TEST_P(EngineAtStages, ReducesInTheDtypeOfTheConfiguration) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Params<double> params;
        params.add(0, "w", {4}, 0.0);
        Engine engine(shared(comm), params.in_units(),
                      fmt::format(R"({{"train_batch_size": 2, "gradient_clipping": 0, "communication_data_type": "fp32",
                          "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}}, "zero_optimization": {{"stage": {}}}}})",
                                  GetParam()));
        constexpr double value = 1 + 0x1p-40;
        if (GetParam() == 0) {  // gradients are written in the dtype of their parameters
            pass_with<double>(engine, [&](size_t, std::span<double> grad) { std::ranges::fill(grad, value); });
        } else {
            pass_with<float>(
                engine, [&](size_t, std::span<float> grad) { std::ranges::fill(grad, static_cast<float>(value)); });
        }
        EXPECT_TRUE(engine.step());
        EXPECT_EQ(values_of<double>(engine, 0), std::vector<double>(4, -1));
    }));
}

// What is whole between the forward and the backward of a unit.
TEST_P(EngineAtStages, ShardsWhatTheStageSays) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Params<double> params = Toy::initial(1);
        Engine engine(shared(comm), params.in_units(), config_of(GetParam(), 1, 1));
        const auto fsdp = engine.model().fsdp();
        EXPECT_EQ(fsdp == nullptr, GetParam() == 0);
        EXPECT_EQ(engine.model().ddp() != nullptr, GetParam() == 0);
        EXPECT_EQ(engine.model().params(), 4U);
        EXPECT_EQ(engine.model().units(), 2U);
        EXPECT_EQ(engine.model().find("fc2.weight"), 2U);
        EXPECT_EQ(engine.model().name_of_param(2), "fc2.weight");
        (void)testing::expect_error([&] { (void)engine.model().find("fc3.weight"); }, Code::invalid_argument);
        engine.forward(0);
        engine.forward_done(0);
        if (!fsdp) return;
        EXPECT_EQ(fsdp->phase(0), GetParam() == 3 ? UnitPhase::sharded : UnitPhase::whole);
        int64_t elements = 0;
        for (size_t i = 0; i < 4; ++i) elements += fsdp->shard(i).numel();
        EXPECT_LT(elements, 20 + 5 + 15 + 3);
    }));
}

TEST_P(EngineAtStages, AnEvaluationBetweenStepsChangesNothing) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        const auto run = [&](bool evaluates) {
            Params<double> params = Toy::initial(1);
            Engine engine(shared(comm), params.in_units(), config_of(GetParam(), 2, 2));
            for (int step = 0; step < 6; ++step) {
                Toy::pass(engine, static_cast<uint64_t>(4 * step + 2 * comm.rank()), 2);
                (void)engine.step();
                if (!evaluates) continue;
                engine.eval();
                EXPECT_FALSE(engine.is_training());
                for (size_t unit = 0; unit < 2; ++unit) {
                    engine.forward(unit);
                    EXPECT_TRUE(std::isfinite(engine.model().param(2 * unit).as<double>()[0]));
                    engine.forward_done(unit);
                    const auto fsdp = engine.model().fsdp();
                    EXPECT_TRUE(!fsdp || fsdp->phase(unit) == UnitPhase::sharded);
                }
                engine.train();
            }
            return values_of<double>(engine, 0);
        };
        EXPECT_EQ(run(true), run(false));
    }));
}

INSTANTIATE_TEST_SUITE_P(Stage, EngineAtStages, ::testing::Values(0, 1, 2, 3));

TEST(EngineStage3, KeepsParametersOverSecondaryPartitions) {
    const Values wanted = reference(5, 24, 1.0, same_adam);
    expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
        Params<double> params = Toy::initial(1);
        Engine engine(shared(comm), params.in_units(), R"({"train_batch_size": 24,
            "optimizer": {"type": "Adam", "params": {"lr": 0.02, "weight_decay": 0.1}},
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})");
        const Values found = trained(engine, comm, 5);
        for (size_t i = 0; i < found.size(); ++i) expect_near(found[i], wanted[i], 1e-10);
    }));
}

TEST(EngineStage3, SecondaryPartitionsMustDivideTheRanks) {
    const auto outcomes = run_ranks(4, test_options(), [](Communicator& comm) {
        Params<double> params = Toy::initial(1);
        Engine(shared(comm), params.in_units(), R"({"train_batch_size": 24, "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}})");
    });
    for (size_t rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(testing::only_error(outcomes, rank).code(), Code::invalid_argument);
    }
}

}  // namespace
}  // namespace tsr
