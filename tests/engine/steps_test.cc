// Boundaries, no_sync, overflows, counters, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "engine/engine.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "toy.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::expect_error;
using testing::Params;
using testing::pass_with;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::values_of;

Params<float> one_tensor() {
    Params<float> params;
    params.add(0, "w", {6}, 0.0F);
    return params;
}

// SGD with a rate of 1: a parameter is minus the sum of its gradients.
std::string sgd(int accumulation, const std::string& more = "") {
    return fmt::format(
        R"({{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": {}, "gradient_clipping": 0,
        "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}}{}}})",
        accumulation, more);
}

void pass_of(Engine& engine, float value) {
    pass_with<float>(engine, [&](size_t, std::span<float> grad) { std::ranges::fill(grad, value); });
}

void expect_values(Engine& engine, float value) {
    EXPECT_EQ(values_of<float>(engine, 0), std::vector<float>(6, value));
}

// --- boundaries

TEST(EngineSteps, CountsMicroStepsAndSteps) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(3));
        EXPECT_EQ(engine.batch(), (BatchSizes{6, 1, 3}));
        EXPECT_FLOAT_EQ(static_cast<float>(engine.loss_factor()), 1.0F / 3);
        for (int i = 1; i <= 7; ++i) {
            pass_of(engine, 1);
            EXPECT_EQ(engine.step(), i % 3 == 0);
            EXPECT_EQ(engine.counters().micro_steps, i);
            EXPECT_EQ(engine.counters().global_steps, i / 3);
            EXPECT_EQ(engine.counters().global_samples, i / 3 * 6);
        }
        expect_values(engine, -6);
    }));
}

TEST(EngineSteps, TheBoundaryCanBeSet) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(2));
        engine.set_boundary(false);
        for (int i = 0; i < 3; ++i) {
            pass_of(engine, 1);
            EXPECT_FALSE(engine.step());
        }
        engine.set_boundary(true);
        pass_of(engine, 1);
        EXPECT_TRUE(engine.step());
        expect_values(engine, -4);
        pass_of(engine, 1);
        EXPECT_TRUE(engine.step());
        expect_values(engine, -5);
        engine.set_boundary(std::nullopt);
        for (int i = 0; i < 2; ++i) {
            pass_of(engine, 1);
            EXPECT_EQ(engine.step(), i == 1);
        }
        expect_values(engine, -7);
    }));
}

TEST(EngineSteps, TheBoundaryIsNotSetOnceAPassHasBegun) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(2));
        engine.backward(0);
        (void)expect_error([&] { engine.set_boundary(true); }, Code::invalid_state);
        engine.unit_ready(0);
        engine.backward_done();
        (void)expect_error([&] { engine.set_boundary(true); }, Code::invalid_state);
        (void)engine.step();
        engine.set_boundary(true);
    }));
}

TEST(EngineSteps, EachStepIsABoundaryIfTheProgramAccumulates) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(4, R"(, "managed_gradient_accumulation": false)"));
        pass_of(engine, 1);
        EXPECT_TRUE(engine.step());
        expect_values(engine, -1);
    }));
}

TEST(EngineSteps, PassesInNoSyncAreReducedByTheNextOne) {
    for (const int stage : {0, 1}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            auto params = one_tensor();
            Engine engine(shared(comm), params.in_units(),
                          sgd(1, fmt::format(R"(, "zero_optimization": {{"stage": {}}})", stage)));
            engine.begin_no_sync();
            for (int i = 0; i < 3; ++i) pass_of(engine, static_cast<float>(comm.rank()));
            const Error error = expect_error([&] { (void)engine.step(); }, Code::invalid_state);
            EXPECT_NE(std::string(error.what()).find("step() is not allowed inside no_sync"), std::string::npos);
            (void)expect_error([&] { engine.begin_no_sync(); }, Code::invalid_state);
            engine.end_no_sync();
            (void)expect_error([&] { engine.end_no_sync(); }, Code::invalid_state);
            pass_of(engine, static_cast<float>(comm.rank()));
            EXPECT_TRUE(engine.step());
            EXPECT_EQ(engine.counters().micro_steps, 1);
            const auto ddp = engine.model().ddp();
            EXPECT_EQ(ddp ? ddp->synced_steps() : engine.model().fsdp()->synced_steps(), 1);
            expect_values(engine, -2);  // the mean of 0 and 4
        }));
    }
}

TEST(EngineSteps, NoSyncIsRefusedWhereGradientsAreSharded) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(1, R"(, "zero_optimization": {"stage": 2})"));
        const Error error = expect_error([&] { engine.begin_no_sync(); }, Code::invalid_state);
        EXPECT_NE(std::string(error.what()).find("no_sync is not possible at stage 2"), std::string::npos)
            << error.what();
    }));
}

TEST(EngineSteps, CallsInAnotherOrderAreRefused) {
    for (const int stage : {0, 3}) {
        expect_all_well(run_ranks(1, test_options(), [&](Communicator& comm) {
            auto params = one_tensor();
            Engine engine(shared(comm), params.in_units(),
                          sgd(2, fmt::format(R"(, "zero_optimization": {{"stage": {}}})", stage)));
            (void)expect_error([&] { (void)engine.step(); }, Code::invalid_state);
            engine.backward(0);
            (void)expect_error([&] { (void)engine.step(); }, Code::invalid_state);
            (void)expect_error([&] { engine.backward(1); }, Code::invalid_argument);
            (void)expect_error([&] { engine.ready(1); }, Code::invalid_argument);
            std::ranges::fill(engine.model().grad(0).as<float>(), 1.0F);
            engine.ready(0);
            (void)expect_error([&] { engine.ready(0); }, Code::invalid_state);
            engine.backward_done();
            const Error error = expect_error([&] { engine.backward(0); }, Code::invalid_state);
            EXPECT_NE(std::string(error.what()).find("step() was not called after the last one"), std::string::npos);
            EXPECT_FALSE(engine.step());
            (void)expect_error([&] { (void)engine.step(); }, Code::invalid_state);
            pass_of(engine, 3);
            EXPECT_TRUE(engine.step());
            expect_values(engine, -4);
        }));
    }
}

TEST(EngineSteps, BatchSizesChangeBetweenSteps) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(2));
        pass_of(engine, 1);
        (void)expect_error([&] { engine.set_train_batch_size(6); }, Code::invalid_state);
        (void)engine.step();
        (void)expect_error([&] { engine.set_train_batch_size(6); }, Code::invalid_state);
        pass_of(engine, 1);
        EXPECT_TRUE(engine.step());
        (void)expect_error([&] { engine.set_train_batch_size(5); }, Code::invalid_argument);
        engine.set_train_batch_size(6);
        EXPECT_EQ(engine.batch(), (BatchSizes{6, 1, 3}));
        for (int i = 0; i < 3; ++i) {
            pass_of(engine, 1);
            EXPECT_EQ(engine.step(), i == 2);
        }
        engine.set_train_micro_batch_size(4);
        EXPECT_EQ(engine.batch(), (BatchSizes{24, 4, 3}));
        EXPECT_EQ(engine.counters().global_samples, 4 + 6);
    }));
}

TEST(EngineSteps, TheRateIsSetAndTheScheduleFollowsSteps) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(2), std::make_shared<LrSchedule>(exponential_lr(0.5)));
        EXPECT_EQ(engine.lr(), 1);
        for (int i = 0; i < 4; ++i) {
            pass_of(engine, 1);
            (void)engine.step();
        }
        EXPECT_EQ(engine.schedule()->steps(), 2);
        EXPECT_EQ(engine.lr(), 0.25);
        expect_values(engine, -(1 + 0.5F) * 2);
        engine.set_lr(4);
        for (int i = 0; i < 2; ++i) {
            pass_of(engine, 1);
            (void)engine.step();
        }
        EXPECT_EQ(engine.lr(), 0.125);
        expect_values(engine, -(1 + 0.5F + 4) * 2);
        (void)expect_error([&] { engine.set_lr(NAN); }, Code::invalid_argument);
    }));
}

TEST(EngineSteps, ARateThatCannotBeIsRefusedBeforeTheStep) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(2), std::make_shared<LrSchedule>(exponential_lr(1e200)));
        for (int i = 0; i < 2; ++i) {
            pass_of(engine, 1);
            EXPECT_EQ(engine.step(), i == 1);
        }
        const auto values = values_of<float>(engine, 0);
        pass_of(engine, 1);
        EXPECT_FALSE(engine.step());
        pass_of(engine, 1);
        for (int i = 0; i < 2; ++i) {
            const Error error = expect_error([&] { (void)engine.step(); }, Code::invalid_argument);
            EXPECT_NE(std::string(error.what()).find("would be inf at step 2"), std::string::npos) << error.what();
            EXPECT_EQ(values_of<float>(engine, 0), values);
            EXPECT_EQ(engine.counters().global_steps, 1);
            EXPECT_EQ(engine.optimizer()->steps(), 1);
        }
        engine.schedule()->set_steps(0);
        EXPECT_TRUE(engine.step()) << "the gradients are still there";
        EXPECT_EQ(engine.schedule()->steps(), 1);
    }));
}

// --- the optimizer belongs to the engine

TEST(EngineSteps, TheOptimizerStepsInTheEngineAlone) {
    for (const int stage : {0, 3}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            auto params = one_tensor();
            std::shared_ptr<Optimizer> optimizer;
            {
                Engine engine(shared(comm), params.in_units(),
                              sgd(1, fmt::format(R"(, "zero_optimization": {{"stage": {}}})", stage)));
                optimizer = engine.optimizer();
                for (int step = 1; step <= 2; ++step) {
                    pass_of(engine, 1);
                    for (const std::function<void()>& call : std::vector<std::function<void()>>{
                             [&] { optimizer->zero_grad(); }, [&] { optimizer->step(); },
                             [&] { (void)optimizer->clip_grad_norm(1, 2); }, [&] { optimizer->clip_grad_value(1); },
                             [&] { (void)optimizer->unscale_grads(2); }}) {
                        const Error error = expect_error(call, Code::invalid_state);
                        EXPECT_NE(std::string(error.what()).find("call the engine's step()"), std::string::npos)
                            << error.what();
                    }
                    EXPECT_TRUE(engine.step());
                }
                expect_values(engine, -2);
            }
            (void)expect_error([&] { optimizer->step(); }, Code::invalid_state);
            EXPECT_EQ(optimizer->steps(), 2);
        }));
    }
}

// --- what must be the same on all ranks

std::string staged(int stage, const std::string& more = "") {
    return sgd(1, fmt::format(R"(, "zero_optimization": {{"stage": {}}}{})", stage, more));
}

// Every call of a pass says so from then on, on every rank.
void expect_mismatch(const std::function<void()>& call, Engine& engine, const std::string& said) {
    for (const auto& each : {call, std::function<void()>([&] { (void)engine.step(); }),
                             std::function<void()>([&] { engine.forward(0); })}) {
        const Error error = expect_error(each, Code::mismatch);
        EXPECT_NE(std::string(error.what()).find(said), std::string::npos) << error.what();
    }
}

TEST(EngineSettings, AnotherLearningRateIsNamedBeforeAnythingSteps) {
    for (const std::string& config : {staged(0), staged(1), staged(2), staged(3),
                                      staged(0, R"(, "bf16": {"enabled": true}, "communication_data_type": "fp32")")}) {
        expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
            auto params = one_tensor();
            Engine engine(shared(comm), params.in_units(), config);
            pass_of(engine, 1);
            EXPECT_TRUE(engine.step());
            if (comm.rank() == 1) engine.set_lr(0.25);
            expect_mismatch([&] { pass_of(engine, 1); }, engine,
                            "rank 1 has the optimizer's lr 0.25, rank 0 has the optimizer's lr 1;");
            EXPECT_EQ(engine.optimizer()->steps(), 1);
            for (const float value : engine.optimizer()->params()[0].value.as<float>()) EXPECT_EQ(value, -1);
        }));
    }
}

TEST(EngineSettings, ALearningRateOfTheLastStepIsNamed) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(1));
        pass_of(engine, 1);
        if (comm.rank() == 0) engine.set_lr(0.5);
        EXPECT_TRUE(engine.step());
        engine.set_lr(1);
        expect_mismatch([&] { pass_of(engine, 1); }, engine,
                        "rank 1 has lr 1 in the last step, rank 0 has lr 0.5 in the last step");
    }));
}

TEST(EngineSettings, AnotherMicroBatchIsNamed) {
    for (const int stage : {0, 3}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            auto params = one_tensor();
            Engine engine(shared(comm), params.in_units(), staged(stage));
            engine.set_train_micro_batch_size(comm.rank() + 3);
            expect_mismatch([&] { pass_of(engine, 1); }, engine,
                            "rank 1 has train_micro_batch_size_per_gpu 4, rank 0 has train_micro_batch_size_per_gpu 3");
        }));
    }
}

// At stage 0 passes between boundaries send nothing: the boundaries meet later.
TEST(EngineSettings, AnotherBoundaryIsNamed) {
    for (const int stage : {0, 2, 3}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            auto params = one_tensor();
            Engine engine(shared(comm), params.in_units(), staged(stage));
            engine.set_boundary(comm.rank() == 0);
            if (stage == 0 && comm.rank() == 1) {
                pass_of(engine, 1);
                EXPECT_FALSE(engine.step());
                engine.set_boundary(true);
            }
            expect_mismatch([&] { pass_of(engine, 1); }, engine,
                            stage == 0
                                ? "rank 1 has a boundary at micro-step 2, rank 0 has a boundary at micro-step 1"
                                : "rank 1 has no boundary at micro-step 1, rank 0 has a boundary at micro-step 1");
            EXPECT_EQ(engine.optimizer()->steps(), 0);
        }));
    }
}

// --- overflow

class EngineInF16 : public ::testing::TestWithParam<int> {
   protected:
    // Gradients in f32, so that the test can write them.
    [[nodiscard]] static std::string config(int stage, const std::string& fp16 = "") {
        return sgd(1, fmt::format(R"(, "fp16": {{"enabled": true, "initial_scale_power": 4, "hysteresis": 1{}}},
            "communication_data_type": "fp32", "zero_optimization": {{"stage": {}}})",
                                  fp16, stage));
    }
};

TEST_P(EngineInF16, AnOverflowOfOneRankSkipsTheStepOfAll) {
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), config(GetParam()),
                      std::make_shared<LrSchedule>(constant_lr(1, 1)));
        const double nothing = std::numeric_limits<double>::infinity();
        const std::vector<std::pair<float, double>> steps{{1.0F, 16},
                                                          {std::numeric_limits<float>::infinity(), 8},
                                                          {std::numeric_limits<float>::quiet_NaN(), 4},
                                                          {1.0F, 4}};
        for (const auto& [factor, scale_after] : steps) {
            const bool finite = std::isfinite(factor);
            const float f = factor;
            pass_with<float>(engine, [&](size_t, std::span<float> grad) {
                std::ranges::fill(grad, static_cast<float>(engine.loss_factor()));
                if (comm.rank() == 1) grad[2] *= f;
            });
            EXPECT_EQ(engine.step(), finite);
            EXPECT_EQ(engine.loss_scale().scale(), scale_after);
            EXPECT_EQ(std::isfinite(engine.grad_norm().value()), finite);
            if (!finite) {
                EXPECT_EQ(engine.grad_norm().value(), nothing);
            }
        }
        EXPECT_EQ(engine.counters().global_steps, 4);
        EXPECT_EQ(engine.counters().skipped_steps, 2);
        EXPECT_EQ(engine.counters().global_samples, 12);
        EXPECT_EQ(engine.schedule()->steps(), 2);
        // Two steps with gradients of 1, in f32 masters of the f16 parameters.
        const auto shard = engine.model().fsdp()->shard(0).as<float>();
        for (const float value : shard) EXPECT_EQ(value, -2);
        EXPECT_TRUE(comm.rank() == 0 || (shard.size() == 6) == (GetParam() == 0))
            << "each rank has all masters at stage 0";
        EXPECT_EQ(engine.model().fsdp()->param(0).whole_dtype, DType::f16);
    }));
}

TEST_P(EngineInF16, AnOverflowAtTheMinimumIsAnErrorOfAllRanks) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Params<float> params;
        params.add(0, "w", {100});
        Engine engine(shared(comm), params.in_units(), config(GetParam(), R"(, "min_loss_scale": 16)"));
        pass_with<float>(engine, [&](size_t, std::span<float> grad) {
            std::ranges::fill(grad, 1.0F);
            if (comm.rank() == 0) grad[99] = std::numeric_limits<float>::infinity();  // of rank 1's shard
        });
        const Error error = expect_error([&] { (void)engine.step(); }, Code::invalid_state);
        const std::string message = error.what();
        EXPECT_NE(message.find("at its minimum 16"), std::string::npos) << message;
        EXPECT_NE(message.find(GetParam() == 0 ? "of ranks 0 and 1 have infinities or NaN (rank 0: \"w\")"
                                               : "of rank 1 have infinities or NaN (rank 1: \"w\")"),
                  std::string::npos)
            << message;
        EXPECT_NE(message.find("load the last checkpoint into a new one"), std::string::npos) << message;
        for (const std::function<void()>& call : std::vector<std::function<void()>>{
                 [&] { (void)engine.step(); }, [&] { pass_of(engine, 1); }, [&] { engine.backward(0); },
                 [&] { (void)engine.state(); }, [&] { engine.set_train_batch_size(4); }}) {
            EXPECT_EQ(std::string(expect_error(call, Code::invalid_state).what()), message);
        }
        EXPECT_EQ(engine.counters().global_steps, 0);
    }));
}

INSTANTIATE_TEST_SUITE_P(Stage, EngineInF16, ::testing::Values(0, 1, 2, 3));

TEST(EngineInBf16, SkipsStepsUnlessToldNotTo) {
    for (const bool checks : {true, false}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            auto params = one_tensor();
            Engine engine(shared(comm), params.in_units(),
                          sgd(1, fmt::format(R"(, "bf16": {{"enabled": true, "check_grad_overflow": {}}},
                              "communication_data_type": "fp32")",
                                             checks)));
            EXPECT_EQ(engine.loss_factor(), 1);
            pass_of(engine, comm.rank() == 1 ? std::numeric_limits<float>::infinity() : 1.0F);
            EXPECT_EQ(engine.step(), !checks);
            EXPECT_EQ(engine.counters().skipped_steps, checks ? 1 : 0);
        }));
    }
}

TEST(EngineSteps, OverflowsAreFoundWithoutANorm) {
    for (const char* precision : {"fp16", "bf16"}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            auto params = one_tensor();
            Engine engine(shared(comm), params.in_units(),
                          sgd(1, fmt::format(R"(, "{}": {{"enabled": true}}, "communication_data_type": "fp32",
                              "zero_optimization": {{"stage": 1, "compute_grad_norm": false}})",
                                             precision)));
            for (const float value : {std::numeric_limits<float>::infinity(), 1.0F}) {
                pass_of(engine, comm.rank() == 1 ? value : 1.0F);
                EXPECT_EQ(engine.step(), value == 1.0F);
                EXPECT_EQ(engine.grad_norm(), std::nullopt);
            }
            EXPECT_EQ(engine.counters().skipped_steps, 1);
        }));
    }
}

TEST(EngineInF32, NeverSkips) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine engine(shared(comm), params.in_units(), sgd(1));
        pass_of(engine, std::numeric_limits<float>::infinity());
        EXPECT_TRUE(engine.step());
        EXPECT_EQ(engine.grad_norm(), std::numeric_limits<double>::infinity());
    }));
}

TEST(EngineInF64, GradientsWhoseNormOverflowsAreClipped) {
    for (const int stage : {0, 1, 3}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            Params<double> params;
            params.add(0, "w", {6});
            Engine engine(shared(comm), params.in_units(),
                          fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1,
                          "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}}, "zero_optimization": {{"stage": {}}}}})",
                                      stage));
            pass_with<double>(engine, [](size_t, std::span<double> grad) { grad[0] = 3e200, grad[5] = 4e200; });
            EXPECT_TRUE(engine.step());
            EXPECT_DOUBLE_EQ(engine.grad_norm().value(), 5e200);
            const auto values = values_of<double>(engine, 0);
            EXPECT_DOUBLE_EQ(values[0], -0.6);
            EXPECT_DOUBLE_EQ(values[5], -0.8);
        }));
    }
}

// --- what is refused at the start

TEST(EngineCreation, AFaultyConfigurationOfOneRankIsAnErrorOfAll) {
    const auto outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        const std::string text = comm.rank() == 1 ? "{\"train_batch_size\": }" : sgd(1);
        Engine(shared(comm), params.in_units(), text);
    });
    for (size_t rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(testing::only_error(outcomes, rank).code(), Code::invalid_argument);
        EXPECT_NE(std::string(outcomes[rank]->what()).find("line 1, column 22"), std::string::npos)
            << outcomes[rank]->what();
    }
}

TEST(EngineCreation, ConfigurationsThatDifferAreNamed) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine(shared(comm), params.in_units(), sgd(comm.rank() + 1));
    });
    for (size_t rank = 0; rank < 2; ++rank) {
        const Error error = testing::only_error(outcomes, rank);
        EXPECT_EQ(error.code(), Code::mismatch);
        EXPECT_NE(std::string(error.what()).find("gradient_accumulation_steps"), std::string::npos) << error.what();
    }
}

TEST(EngineCreation, TheOrderOfKeysDoesNotMatter) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        const char* const optimizer = R"("optimizer": {"type": "SGD"})";
        const char* const batch = R"("train_batch_size": 2)";
        const bool first = comm.rank() == 0;
        Engine(shared(comm), params.in_units(),
               fmt::format("{{{}, {}}}", first ? optimizer : batch, first ? batch : optimizer));
    }));
}

TEST(EngineCreation, WhatItCannotTrainIsRefused) {
    const auto communicator = Communicator::self();
    const auto refusal = [&](std::vector<EngineUnit> units, const std::string& config) {
        return std::string(
            expect_error([&] { Engine(communicator, std::move(units), config); }, Code::invalid_argument).what());
    };
    auto params = one_tensor();
    EXPECT_NE(refusal(params.in_units(), "{\"train_batch_size\": 1}").find("has no \"optimizer\""), std::string::npos);
    EXPECT_NE(refusal({}, sgd(1)).find("has no units"), std::string::npos);
    EXPECT_NE(refusal({{"u", {}}}, sgd(1)).find("unit \"u\" has no parameters"), std::string::npos);
    EXPECT_NE(refusal(params.in_units(), R"({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD"}})")
                  .find("does not equal"),
              std::string::npos);
}

TEST(EngineCreation, TwoSchedulesAreRefused) {
    auto params = one_tensor();
    const Error error = expect_error(
        [&] {
            Engine(Communicator::self(), params.in_units(), sgd(1, R"(, "scheduler": {"type": "WarmupLR"})"),
                   std::make_shared<LrSchedule>(exponential_lr(0.5)));
        },
        Code::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("leave one of the two out"), std::string::npos) << error.what();
}

TEST(EngineCreation, SchedulesThatDifferAreNamed) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        auto params = one_tensor();
        Engine(shared(comm), params.in_units(), sgd(1),
               std::make_shared<LrSchedule>(exponential_lr(comm.rank() == 0 ? 0.5 : 0.25)));
    });
    for (size_t rank = 0; rank < 2; ++rank) {
        const Error error = testing::only_error(outcomes, rank);
        EXPECT_EQ(error.code(), Code::mismatch);
        EXPECT_NE(std::string(error.what()).find("the schedule exponential"), std::string::npos) << error.what();
    }
}

// --- what it says

TEST(EngineReports, GoToTheLogOnce) {
    static std::vector<std::string> lines;
    lines.clear();
    log::set_level(log::Level::info);
    log::set_sink([](int32_t, const char* line, void*) { lines.emplace_back(line); }, nullptr, nullptr);
    {
        const auto communicator = Communicator::self();
        auto params = one_tensor();
        Engine engine(
            communicator, params.in_units(),
            sgd(1, R"(, "wall_clock_breakdown": true, "dump_state": true, "steps_per_print": 2, "comet": true)"));
        for (int i = 0; i < 4; ++i) {
            pass_of(engine, 1);
            (void)engine.step();
        }
    }
    log::set_sink(nullptr, nullptr, nullptr);
    log::set_level(log::Level::warning);
    const auto count = [](std::string_view part) {
        return std::ranges::count_if(lines,
                                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
    };
    EXPECT_EQ(count("mean times: forward "), 2);
    EXPECT_EQ(count("\"comet\" (line 2, column "), 1);
    EXPECT_EQ(count("the engine's configuration: {"), 1);
    EXPECT_EQ(count("step 2, skipped 0, lr 1, loss scale 1"), 1);
    EXPECT_EQ(count("step 4, skipped 0"), 1);
    EXPECT_EQ(count("step 3, skipped 0"), 0);
}

}  // namespace
}  // namespace tsr
