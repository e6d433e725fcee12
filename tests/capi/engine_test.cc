// tessera/engine.h and tessera/loss_scale.h through the C ABI.
#include "tessera/engine.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <string>

#include "api.hpp"
#include "temporary_directory.hpp"

namespace {

using ::testing::HasSubstr;
using Engine = api::Owned<tsr_engine>;

constexpr int64_t batch = 12;  // samples of a step, which 1 to 3 ranks divide

// A model of two units in f64. Each element learns what a sample wants of it; the loss is the mean square of what is missing.
struct Model {
    api::Array<double> weight{{7, 3}, 0.5};
    api::Array<double> bias{{2}, -0.5};
    api::Array<double> last{{11}, 0};
    std::array<tsr_param, 2> first{{{"fc.weight", weight.tensor()}, {"module.fc.bias", bias.tensor()}}};
    tsr_param second{"last", last.tensor()};
    std::array<tsr_engine_unit, 2> units{{{"fc", first.data(), 2, 0}, {"last", &second, 1, 0}}};

    tsr_status create(tsr_comm* comm, const std::string& config, tsr_engine** out) {
        return tsr_engine_create(comm, units.data(), units.size(), config.c_str(), nullptr, out);
    }
};
constexpr size_t params = 3;
constexpr size_t unit_of[params] = {0, 0, 1};

size_t size_of(const tsr_tensor& tensor) {
    size_t size = 1;
    for (int32_t d = 0; d < tensor.ndim; ++d) size *= static_cast<size_t>(tensor.shape[d]);
    return size;
}

double wanted(int64_t sample, size_t param, size_t element) {
    return std::sin(static_cast<double>(sample) + 3 * static_cast<double>(param) + static_cast<double>(element));
}

// The gradient of a parameter for the mean loss over samples, times `factor`.
void differentiate(const tsr_tensor& param, const tsr_tensor& grad, size_t index, int64_t begin, int64_t samples,
                   double factor, bool adds) {
    const auto* const values = static_cast<const double*>(param.data);
    auto* const grads = static_cast<double*>(grad.data);
    for (size_t k = 0; k < size_of(param); ++k) {
        double sum = 0;
        for (int64_t s = begin; s < begin + samples; ++s) sum += values[k] - wanted(s, index, k);
        const double mine = sum * factor / static_cast<double>(samples);
        grads[k] = adds ? grads[k] + mine : mine;
    }
}

// A backward pass of an engine over these samples.
void pass(tsr_engine* engine, int64_t begin, int64_t samples) {
    double factor = 0;
    tsr_flag adds = 0;
    for (const size_t unit : {0, 1}) {
        ASSERT_OK(tsr_engine_forward(engine, unit));
        ASSERT_OK(tsr_engine_forward_done(engine, unit));
    }
    ASSERT_OK(tsr_engine_loss_factor(engine, &factor));
    ASSERT_OK(tsr_engine_adds_gradients(engine, &adds));
    for (const size_t unit : {1, 0}) {
        ASSERT_OK(tsr_engine_backward(engine, unit));
        for (size_t i = 0; i < params; ++i) {
            if (unit_of[i] != unit) continue;
            tsr_tensor param{};
            tsr_tensor grad{};
            ASSERT_OK(tsr_engine_param(engine, i, &param));
            ASSERT_OK(tsr_engine_grad(engine, i, &grad));
            differentiate(param, grad, i, begin, samples, factor, adds == 1);
            if (unit == 1) {
                ASSERT_OK(tsr_engine_ready(engine, i));
            }
        }
        ASSERT_OK(tsr_engine_unit_ready(engine, unit));
    }
    ASSERT_OK(tsr_engine_backward_done(engine));
}

// Steps of the optimizer from `first` on, over all ranks' shares of their batches.
void train(tsr_engine* engine, tsr_comm* comm, int64_t first, int64_t last) {
    int32_t rank = 0;
    int32_t ranks = 0;
    int64_t micro = 0;
    int64_t accumulation = 0;
    ASSERT_OK(tsr_comm_rank(comm, &rank));
    ASSERT_OK(tsr_comm_world_size(comm, &ranks));
    ASSERT_OK(tsr_engine_batch(engine, nullptr, &micro, &accumulation));
    for (int64_t step = first; step < last; ++step) {
        for (int64_t p = 0; p < accumulation; ++p) {
            pass(engine, step * batch + (p * ranks + rank) * micro, micro);
            tsr_flag boundary = -1;
            tsr_flag stepped = -1;
            EXPECT_OK(tsr_engine_is_boundary(engine, &boundary));
            EXPECT_EQ(boundary, p + 1 == accumulation);
            ASSERT_OK(tsr_engine_step(engine, &stepped));
            EXPECT_EQ(stepped, boundary);
        }
    }
}

using Values = std::vector<std::vector<double>>;

// All parameters, whole. Collective.
Values values_of(tsr_engine* engine) {
    Values values(params);
    EXPECT_OK(tsr_engine_set_training(engine, 0));
    for (const size_t unit : {0, 1}) {
        EXPECT_OK(tsr_engine_forward(engine, unit));
        for (size_t i = 0; i < params; ++i) {
            tsr_tensor param{};
            if (unit_of[i] != unit) continue;
            EXPECT_OK(tsr_engine_param(engine, i, &param));
            const auto* const begin = static_cast<const double*>(param.data);
            values[i].assign(begin, begin + size_of(param));
        }
        EXPECT_OK(tsr_engine_forward_done(engine, unit));
    }
    EXPECT_OK(tsr_engine_set_training(engine, 1));
    return values;
}

void expect_near(const Values& found, const Values& right) {
    ASSERT_EQ(found.size(), right.size());
    for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i].size(), right[i].size());
        for (size_t k = 0; k < found[i].size(); ++k) ASSERT_NEAR(found[i][k], right[i][k], 1e-12) << i << ", " << k;
    }
}

std::string config_of(int stage, int accumulation, int ranks) {
    return "{\"train_batch_size\": " + std::to_string(batch) +
           ", \"gradient_accumulation_steps\": " + std::to_string(accumulation) +
           ", \"train_micro_batch_size_per_gpu\": " + std::to_string(batch / accumulation / ranks) +
           R"(, "optimizer": {"type": "Adam", "params": {"lr": 0.05, "weight_decay": 0.1}},
               "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}},
               "zero_optimization": {"stage": )" +
           std::to_string(stage) + "}}";
}

// The same by DDP, AdamW and a schedule.
Values by_hand(tsr_comm* comm, int64_t steps) {
    Model model;
    const std::array<tsr_param, params> list{{model.first[0], model.first[1], model.second}};
    api::Owned<tsr_ddp> ddp;
    EXPECT_OK(tsr_ddp_create(comm, list.data(), list.size(), nullptr, ddp.out()));
    tsr_adamw_options options;
    EXPECT_OK(tsr_adamw_options_init(&options, sizeof options));
    options.lr = 0.05;
    options.weight_decay = 0.1;
    api::Owned<tsr_optimizer> optimizer;
    EXPECT_OK(tsr_ddp_adamw(ddp, &options, optimizer.out()));
    tsr_lr_warmup_options warmup;
    EXPECT_OK(tsr_lr_warmup_options_init(&warmup, sizeof warmup));
    warmup.warmup_num_steps = 8;
    warmup.warmup_type = TSR_LR_WARMUP_LINEAR;
    api::Owned<tsr_lr_schedule> schedule;
    EXPECT_OK(tsr_lr_warmup(&warmup, schedule.out()));
    EXPECT_OK(tsr_lr_schedule_attach(schedule, optimizer));
    int32_t rank = 0;
    EXPECT_OK(tsr_comm_rank(comm, &rank));
    for (int64_t step = 0; step < steps; ++step) {
        for (size_t i = 0; i < params; ++i) {
            tsr_param param{};
            tsr_tensor grad{};
            EXPECT_OK(tsr_ddp_param(ddp, i, &param));
            EXPECT_OK(tsr_ddp_grad(ddp, i, &grad));
            differentiate(param.tensor, grad, i, step * batch + rank * batch / 2, batch / 2, 1, false);
        }
        EXPECT_OK(tsr_ddp_ready_all(ddp));
        EXPECT_OK(tsr_ddp_wait(ddp));
        EXPECT_OK(tsr_optimizer_clip_grad_norm(optimizer, 1, 2, nullptr));
        EXPECT_OK(tsr_optimizer_step(optimizer));
        EXPECT_OK(tsr_lr_schedule_step(schedule));
    }
    return {model.weight.values, model.bias.values, model.last.values};
}

TEST(EngineApi, TrainsAsItsPartsDo) {
    for (int stage = 0; stage <= 3; ++stage) {
        for (const int accumulation : {1, 3}) {
            api::run_ranks(2, [&](tsr_comm* comm, int32_t) {
                Model model;
                Engine engine;
                ASSERT_OK(model.create(comm, config_of(stage, accumulation, 2), engine.out()));
                train(engine, comm, 0, 10);
                expect_near(values_of(engine), by_hand(comm, 10));
                tsr_engine_counts counts{sizeof(tsr_engine_counts), 0, 0, 0, 0};
                ASSERT_OK(tsr_engine_counters(engine, &counts));
                EXPECT_EQ(counts.global_steps, 10);
                EXPECT_EQ(counts.global_samples, 10 * batch);
                EXPECT_EQ(counts.skipped_steps, 0);
                EXPECT_EQ(counts.micro_steps, 10 * accumulation);
            });
        }
    }
}

TEST(EngineApi, KnowsItsModel) {
    const auto comm = api::alone();
    Model model;
    Engine engine;
    ASSERT_OK(model.create(comm, config_of(3, 1, 1), engine.out()));
    size_t count = 0;
    ASSERT_OK(tsr_engine_unit_count(engine, &count));
    EXPECT_EQ(count, 2U);
    ASSERT_OK(tsr_engine_param_count(engine, &count));
    EXPECT_EQ(count, params);
    const char* name = nullptr;
    size_t unit = 7;
    ASSERT_OK(tsr_engine_param_name(engine, 1, &name, &unit));
    EXPECT_STREQ(name, "fc.bias") << "without \"module.\"";
    EXPECT_EQ(unit, 0U);
    ASSERT_OK(tsr_engine_param_name(engine, 2, nullptr, nullptr));
    size_t index = 7;
    ASSERT_OK(tsr_engine_find(engine, "last", &index));
    EXPECT_EQ(index, 2U);
    EXPECT_FAILS(tsr_engine_find(engine, "other", &index), TSR_E_INVALID_ARGUMENT, "no parameter \"other\"");
    EXPECT_FAILS(tsr_engine_param_name(engine, params, &name, &unit), TSR_E_INVALID_ARGUMENT, "3");
    tsr_tensor tensor{};
    EXPECT_EQ(tsr_engine_param(engine, 0, &tensor), TSR_E_INVALID_STATE) << "its unit is sharded";
    EXPECT_EQ(tsr_engine_grad(engine, 0, &tensor), TSR_E_INVALID_STATE);
    ASSERT_OK(tsr_engine_forward(engine, 0));
    ASSERT_OK(tsr_engine_param(engine, 0, &tensor));
    EXPECT_EQ(tensor.ndim, 2);
    EXPECT_EQ(tensor.shape[0], 7);
    EXPECT_EQ(tensor.shape[1], 3);
    EXPECT_EQ(tensor.dtype, TSR_DTYPE_F64);
}

TEST(EngineApi, SettingsAreReadAndWritten) {
    const auto comm = api::alone();
    Model model;
    Engine engine;
    ASSERT_OK(model.create(comm, config_of(0, 2, 1), engine.out()));
    double number = -1;
    ASSERT_OK(tsr_engine_grad_norm(engine, &number));
    EXPECT_TRUE(std::isnan(number));
    ASSERT_OK(tsr_engine_lr(engine, &number));
    EXPECT_EQ(number, 0) << "where the warm-up begins";
    ASSERT_OK(tsr_engine_set_lr(engine, 0.25));
    ASSERT_OK(tsr_engine_lr(engine, &number));
    EXPECT_EQ(number, 0.25);
    EXPECT_EQ(tsr_engine_set_lr(engine, NAN), TSR_E_INVALID_ARGUMENT);
    ASSERT_OK(tsr_engine_loss_scale(engine, &number));
    EXPECT_EQ(number, 1);
    tsr_flag flag = -1;
    ASSERT_OK(tsr_engine_is_training(engine, &flag));
    EXPECT_EQ(flag, 1);
    ASSERT_OK(tsr_engine_set_training(engine, 0));
    ASSERT_OK(tsr_engine_is_training(engine, &flag));
    EXPECT_EQ(flag, 0);
    EXPECT_FAILS(tsr_engine_set_training(engine, 2), TSR_E_INVALID_ARGUMENT, "training is 2");
    int64_t train_batch = 0;
    int64_t micro = 0;
    int64_t accumulation = 0;
    ASSERT_OK(tsr_engine_set_train_batch_size(engine, 18));
    ASSERT_OK(tsr_engine_set_train_micro_batch_size(engine, 5));
    ASSERT_OK(tsr_engine_batch(engine, &train_batch, &micro, &accumulation));
    EXPECT_EQ(train_batch, 15);
    EXPECT_EQ(micro, 5);
    EXPECT_EQ(accumulation, 3);
    EXPECT_FAILS(tsr_engine_set_train_batch_size(engine, 16), TSR_E_INVALID_ARGUMENT, "choose a multiple of 5");
    EXPECT_FAILS(tsr_engine_set_train_micro_batch_size(engine, 0), TSR_E_INVALID_ARGUMENT, "at least 1");
    const std::string json = api::text_of([&](auto... to) { return tsr_engine_description(engine, to...); });
    EXPECT_THAT(json, HasSubstr("\"train_batch_size\":15,"));
    EXPECT_THAT(json, HasSubstr("\"type\":\"WarmupLR\""));

    api::Owned<tsr_optimizer> optimizer;
    ASSERT_OK(tsr_engine_optimizer(engine, optimizer.out()));
    api::Owned<tsr_lr_schedule> schedule;
    ASSERT_OK(tsr_engine_lr_schedule(engine, schedule.out()));
    EXPECT_FAILS(tsr_optimizer_step(optimizer), TSR_E_INVALID_STATE, "call the engine's step()");
    EXPECT_FAILS(tsr_optimizer_zero_grad(optimizer), TSR_E_INVALID_STATE, "call the engine's step()");
    engine.reset();
    ASSERT_OK(tsr_optimizer_lr(optimizer, &number));
    EXPECT_EQ(number, 0.25);
    ASSERT_OK(tsr_lr_schedule_lr_at(schedule, 4, 0.05, &number));
    EXPECT_DOUBLE_EQ(number, 0.05 * 3 / 8);
}

TEST(EngineApi, AScheduleOfTheProgramFollowsItsSteps) {
    const auto comm = api::alone();
    Model model;
    api::Owned<tsr_lr_schedule> schedule;
    ASSERT_OK(tsr_lr_exponential(0.5, schedule.out()));
    Engine engine;
    const char* const config = R"({"train_batch_size": 12, "optimizer": {"type": "SGD", "params": {"lr": 1}}})";
    ASSERT_OK(tsr_engine_create(comm, model.units.data(), 2, config, schedule, engine.out()));
    schedule.reset();
    train(engine, comm, 0, 2);
    double lr = 0;
    ASSERT_OK(tsr_engine_lr(engine, &lr));
    EXPECT_EQ(lr, 0.25);
    ASSERT_OK(model.create(comm, config, engine.out()));
    EXPECT_FAILS(tsr_engine_lr_schedule(engine, schedule.out()), TSR_E_INVALID_STATE, "no learning-rate schedule");
    EXPECT_EQ(static_cast<tsr_lr_schedule*>(schedule), nullptr);
}

// --- fp16

// Gradients of 1 times the factor, with an infinity on one rank if `overflows`.
void pass_of_ones(tsr_engine* engine, bool overflows) {
    double factor = 0;
    ASSERT_OK(tsr_engine_loss_factor(engine, &factor));
    for (const size_t unit : {0, 1}) {
        ASSERT_OK(tsr_engine_forward(engine, unit));
        ASSERT_OK(tsr_engine_forward_done(engine, unit));
    }
    for (const size_t unit : {1, 0}) {
        ASSERT_OK(tsr_engine_backward(engine, unit));
        for (size_t i = 0; i < params; ++i) {
            if (unit_of[i] != unit) continue;
            tsr_tensor grad{};
            ASSERT_OK(tsr_engine_grad(engine, i, &grad));
            ASSERT_EQ(grad.dtype, TSR_DTYPE_F32);
            auto* const values = static_cast<float*>(grad.data);
            std::fill(values, values + size_of(grad), static_cast<float>(factor));
            if (overflows && i == 2) values[3] = std::numeric_limits<float>::infinity();
        }
        ASSERT_OK(tsr_engine_unit_ready(engine, unit));
    }
    ASSERT_OK(tsr_engine_backward_done(engine));
}

TEST(EngineApi, AnInfinityOfOneRankSkipsTheStepOfAll) {
    for (int stage = 0; stage <= 3; ++stage) {
        api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
            Model model;
            Engine engine;
            const std::string config =
                R"({"train_batch_size": 2, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 1}},
                    "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1, "lr_range_test_step_size": 1}},
                    "fp16": {"enabled": true, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2},
                    "communication_data_type": "fp32", "zero_optimization": {"stage": )" +
                std::to_string(stage) + "}}";
            ASSERT_OK(model.create(comm, config, engine.out()));
            const double lrs[] = {2, 2, 3};
            const double scales[] = {16, 8, 8};
            for (int step = 0; step < 3; ++step) {
                pass_of_ones(engine, step == 1 && rank == 1);
                tsr_flag stepped = -1;
                ASSERT_OK(tsr_engine_step(engine, &stepped));
                EXPECT_EQ(stepped, step != 1);
                double number = 0;
                ASSERT_OK(tsr_engine_lr(engine, &number));
                EXPECT_EQ(number, lrs[step]);
                ASSERT_OK(tsr_engine_loss_scale(engine, &number));
                EXPECT_EQ(number, scales[step]);
                ASSERT_OK(tsr_engine_grad_norm(engine, &number));
                if (step == 1) {
                    EXPECT_TRUE(std::isinf(number));
                } else {
                    EXPECT_NEAR(number, std::sqrt(34.0), 1e-5) << "of as many elements, unscaled";
                }
            }
            tsr_engine_counts counts{sizeof(tsr_engine_counts), 0, 0, 0, 0};
            ASSERT_OK(tsr_engine_counters(engine, &counts));
            EXPECT_EQ(counts.global_steps, 3);
            EXPECT_EQ(counts.skipped_steps, 1);
            tsr_tensor param{};
            ASSERT_OK(tsr_engine_forward(engine, 1));
            ASSERT_OK(tsr_engine_param(engine, 2, &param));
            EXPECT_EQ(param.dtype, TSR_DTYPE_F16);
            for (size_t k = 0; k < size_of(param); ++k) {
                EXPECT_EQ(static_cast<const uint16_t*>(param.data)[k], 0xc200) << "-3 in f16: of rates 1 and 2";
            }
            ASSERT_OK(tsr_engine_set_training(engine, 0));
            ASSERT_OK(tsr_engine_forward_done(engine, 1));
        });
    }
}

// --- checkpoints

struct Case {
    int32_t ranks;
    int stage;
    int accumulation;
};

TEST(EngineApi, ACheckpointGoesOnAtOtherRanksAndStages) {
    Values right;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        const Values values = by_hand(comm, 14);
        if (rank == 0) right = values;
    });
    const Case cases[] = {{1, 0, 1}, {2, 1, 2}, {3, 2, 1}, {2, 3, 1}, {3, 3, 2}, {1, 2, 3}};
    for (const Case& saver_case : cases) {
        api::TemporaryDirectory directory;
        const auto engine_of = [&](tsr_comm* comm, const Case& one, Model& model, Engine& engine,
                                   api::Owned<tsr_state>& state) {
            ASSERT_OK(model.create(comm, config_of(one.stage, one.accumulation, one.ranks), engine.out()));
            ASSERT_OK(tsr_state_create(state.out()));
            ASSERT_OK(tsr_state_add_engine(state, "engine", engine));
        };
        api::run_ranks(saver_case.ranks, [&](tsr_comm* comm, int32_t) {
            Model model;
            Engine engine;
            api::Owned<tsr_state> state;
            engine_of(comm, saver_case, model, engine, state);
            train(engine, comm, 0, 6);
            api::Owned<tsr_saver> saver;
            ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
            ASSERT_OK(tsr_saver_save(saver, 6, state));
        });
        for (const Case& loader_case : cases) {
            SCOPED_TRACE(testing::Message() << saver_case.ranks << " ranks at stage " << saver_case.stage << ", then "
                                            << loader_case.ranks << " at stage " << loader_case.stage);
            api::run_ranks(loader_case.ranks, [&](tsr_comm* comm, int32_t) {
                Model model;
                Engine engine;
                api::Owned<tsr_state> state;
                engine_of(comm, loader_case, model, engine, state);
                api::Owned<tsr_saver> saver;
                ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
                int64_t step = 0;
                ASSERT_OK(tsr_saver_resume(saver, state, &step));
                EXPECT_EQ(step, 6);
                tsr_engine_counts counts{sizeof(tsr_engine_counts), 0, 0, 0, 0};
                ASSERT_OK(tsr_engine_counters(engine, &counts));
                EXPECT_EQ(counts.global_steps, 6);
                EXPECT_EQ(counts.global_samples, 6 * batch);
                train(engine, comm, 6, 14);
                expect_near(values_of(engine), right);
            });
        }
    }
}

TEST(EngineApi, GradientsThatWaitAreNotSaved) {
    const auto comm = api::alone();
    Model model;
    Engine engine;
    ASSERT_OK(model.create(comm, config_of(1, 2, 1), engine.out()));
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    ASSERT_OK(tsr_state_add_engine(state, "engine", engine));
    EXPECT_EQ(tsr_state_add_engine(state, "engine", engine), TSR_E_INVALID_ARGUMENT) << "twice";
    pass(engine, 0, 6);
    ASSERT_OK(tsr_engine_step(engine, nullptr));
    api::TemporaryDirectory directory;
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_STATE, "wait for the optimizer's step");
    pass(engine, 6, 6);
    ASSERT_OK(tsr_engine_step(engine, nullptr));
    EXPECT_OK(tsr_saver_save(saver, 1, state));
}

// --- what is refused

TEST(EngineApi, WhatCannotBeCreatedIsRefused) {
    const auto comm = api::alone();
    Model model;
    Engine engine;
    const std::string config = config_of(0, 1, 1);
    const auto refused = [&](const std::string& bad, tsr_status status, const char* what) {
        EXPECT_FAILS(model.create(comm, bad, engine.out()), status, what);
        EXPECT_EQ(static_cast<tsr_engine*>(engine), nullptr);
    };
    refused("", TSR_E_INVALID_ARGUMENT, "line 1");
    refused("[]", TSR_E_INVALID_ARGUMENT, "object");
    refused("{\"train_batch_size\": 12}", TSR_E_INVALID_ARGUMENT, "has no \"optimizer\"");
    refused(R"({"optimizer": {"type": "SGD"}})", TSR_E_INVALID_ARGUMENT, "neither train_batch_size nor");
    refused(R"({"train_batch_size": 1, "optimizer": {"type": "RMSprop"}})", TSR_E_UNSUPPORTED,
            "Adagrad, Lion and Lamb");
    refused(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"}, "scheduler": {"type": "StepLR"}})",
            TSR_E_UNSUPPORTED, "has WarmupLR");
    refused(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"}, "amp": {"enabled": true}})", TSR_E_UNSUPPORTED,
            "\"amp\"");
    EXPECT_FAILS(tsr_engine_create(nullptr, model.units.data(), 2, config.c_str(), nullptr, engine.out()),
                 TSR_E_INVALID_ARGUMENT, "comm is NULL");
    EXPECT_FAILS(tsr_engine_create(comm, nullptr, 2, config.c_str(), nullptr, engine.out()), TSR_E_INVALID_ARGUMENT,
                 "units is NULL");
    EXPECT_FAILS(tsr_engine_create(comm, model.units.data(), 0, config.c_str(), nullptr, engine.out()),
                 TSR_E_INVALID_ARGUMENT, "no units");
    EXPECT_FAILS(tsr_engine_create(comm, model.units.data(), 2, nullptr, nullptr, engine.out()), TSR_E_INVALID_ARGUMENT,
                 "config is NULL");
    EXPECT_FAILS(tsr_engine_create(comm, model.units.data(), 2, config.c_str(), nullptr, nullptr),
                 TSR_E_INVALID_ARGUMENT, "out is NULL");
    const auto with = [&](const tsr_engine_unit& unit) {
        return tsr_engine_create(comm, &unit, 1, config.c_str(), nullptr, engine.out());
    };
    EXPECT_FAILS(with({nullptr, model.first.data(), 2, 0}), TSR_E_INVALID_ARGUMENT, "a unit's name is NULL");
    EXPECT_FAILS(with({"u", nullptr, 2, 0}), TSR_E_INVALID_ARGUMENT, "params of unit 0 (\"u\") is NULL");
    EXPECT_FAILS(with({"u", model.first.data(), 0, 0}), TSR_E_INVALID_ARGUMENT, "\"u\" has no parameters");
    EXPECT_FAILS(with({"u", model.first.data(), 2, 1}), TSR_E_UNSUPPORTED, "reserved");
    const std::array<tsr_param, 2> twice{model.first[0], model.first[0]};
    EXPECT_FAILS(with({"u", twice.data(), 2, 0}), TSR_E_INVALID_ARGUMENT, "fc.weight");
    tsr_param bad = model.first[0];
    bad.tensor.data = nullptr;
    EXPECT_FAILS(with({"u", &bad, 1, 0}), TSR_E_INVALID_ARGUMENT, "fc.weight");
    bad = model.first[0];
    bad.tensor.dtype = 99;
    EXPECT_FAILS(with({"u", &bad, 1, 0}), TSR_E_INVALID_ARGUMENT, "unknown dtype 99");
    bad.tensor.dtype = TSR_DTYPE_I32;
    EXPECT_FAILS(with({"u", &bad, 1, 0}), TSR_E_INVALID_ARGUMENT, "fc.weight");
    bad.name = nullptr;
    EXPECT_FAILS(with({"u", &bad, 1, 0}), TSR_E_INVALID_ARGUMENT, "name is NULL");
    auto other = api::alone();
    tsr_comm* const destroyed = other;
    other.reset();
    EXPECT_FAILS(model.create(destroyed, config, engine.out()), TSR_E_INVALID_STATE, "destroyed");
}

TEST(EngineApi, ABadCallOfOneRankFailsOnAll) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model;
        Engine engine;
        if (rank == 1) model.units[0].name = nullptr;
        EXPECT_FAILS(model.create(comm, config_of(0, 1, 2), engine.out()), TSR_E_INVALID_ARGUMENT, "name is NULL");
    });
}

TEST(EngineApi, AFileThatOneRankLacksIsRefusedOnAll) {
    const tsr::testing::TemporaryDirectory folder;
    const std::string path = (folder.path() / "ds_config.json").string();
    const std::string missing = (folder.path() / "missing.json").string();
    std::ofstream(path) << config_of(0, 1, 2);
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        Model model;
        Engine engine;
        ASSERT_OK(model.create(comm, path, engine.out()));
        Engine none;
        EXPECT_FAILS(model.create(comm, rank == 1 ? missing : path, none.out()), TSR_E_NOT_FOUND, missing.c_str());
    });
}

TEST(EngineApi, CallsOutOfOrderAreRefused) {
    const auto comm = api::alone();
    Model model;
    Engine engine;
    ASSERT_OK(model.create(comm, config_of(1, 2, 1), engine.out()));
    EXPECT_FAILS(tsr_engine_step(engine, nullptr), TSR_E_INVALID_STATE, "without a backward pass");
    EXPECT_FAILS(tsr_engine_end_no_sync(engine), TSR_E_INVALID_STATE, "not on");
    EXPECT_FAILS(tsr_engine_set_boundary(engine, 2), TSR_E_INVALID_ARGUMENT, "boundary is 2");
    EXPECT_EQ(tsr_engine_forward(engine, 2), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_engine_forward_done(engine, 2), TSR_E_INVALID_ARGUMENT);
    pass(engine, 0, 6);
    EXPECT_FAILS(tsr_engine_backward(engine, 1), TSR_E_INVALID_STATE, "step() was not called");
    EXPECT_FAILS(tsr_engine_set_boundary(engine, 1), TSR_E_INVALID_STATE, "before the pass");
    EXPECT_FAILS(tsr_engine_begin_no_sync(engine), TSR_E_INVALID_STATE, "before the pass");
    EXPECT_FAILS(tsr_engine_set_train_batch_size(engine, 24), TSR_E_INVALID_STATE, "before the pass");
    ASSERT_OK(tsr_engine_step(engine, nullptr));
    EXPECT_FAILS(tsr_engine_set_train_micro_batch_size(engine, 3), TSR_E_INVALID_STATE, "1 backward passes");
    EXPECT_EQ(tsr_engine_backward(engine, 2), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_engine_ready(engine, params), TSR_E_INVALID_ARGUMENT);
    EXPECT_EQ(tsr_engine_unit_ready(engine, 2), TSR_E_INVALID_ARGUMENT);
    EXPECT_FAILS(tsr_engine_step(engine, nullptr), TSR_E_INVALID_STATE, "without a backward pass");
    EXPECT_FAILS(tsr_engine_ready(engine, 0), TSR_E_INVALID_STATE, "before the backward of its unit");
    ASSERT_OK(tsr_engine_backward(engine, 1));
    EXPECT_FAILS(tsr_engine_step(engine, nullptr), TSR_E_INVALID_STATE, "call backward_done() first");
}

TEST(EngineApi, NoSyncAndBoundariesAreSet) {
    const auto comm = api::alone();
    Model model;
    Engine engine;
    ASSERT_OK(model.create(comm, config_of(0, 1, 1), engine.out()));
    ASSERT_OK(tsr_engine_begin_no_sync(engine));
    EXPECT_FAILS(tsr_engine_begin_no_sync(engine), TSR_E_INVALID_STATE, "cannot be nested");
    pass(engine, 0, 12);
    EXPECT_FAILS(tsr_engine_step(engine, nullptr), TSR_E_INVALID_STATE, "not allowed inside no_sync");
    ASSERT_OK(tsr_engine_end_no_sync(engine));
    tsr_flag flag = -1;
    ASSERT_OK(tsr_engine_adds_gradients(engine, &flag));
    EXPECT_EQ(flag, 1);
    ASSERT_OK(tsr_engine_set_boundary(engine, 0));
    ASSERT_OK(tsr_engine_is_boundary(engine, &flag));
    EXPECT_EQ(flag, 0);
    pass(engine, 0, 12);
    ASSERT_OK(tsr_engine_step(engine, &flag));
    EXPECT_EQ(flag, 0);
    ASSERT_OK(tsr_engine_set_boundary(engine, 1));
    pass(engine, 0, 12);
    ASSERT_OK(tsr_engine_step(engine, &flag));
    EXPECT_EQ(flag, 1);
    ASSERT_OK(tsr_engine_set_boundary(engine, -1));
    ASSERT_OK(tsr_engine_is_boundary(engine, &flag));
    EXPECT_EQ(flag, 1);
    ASSERT_OK(model.create(comm, config_of(2, 1, 1), engine.out()));
    EXPECT_FAILS(tsr_engine_begin_no_sync(engine), TSR_E_INVALID_STATE, "not possible at stage 2");
}

// --- configurations without an engine

std::string resolved(const char* config, int32_t ranks) {
    return api::text_of([&](auto... to) { return tsr_engine_config(config, ranks, to...); });
}

TEST(EngineApi, AConfigurationIsResolvedWithoutAnEngine) {
    EXPECT_EQ(resolved("{\"train_batch_size\": 12, // samples\n \"gradient_accumulation_steps\": 2,}", 3),
              R"({"ranks":3,"train_batch_size":12,"train_micro_batch_size_per_gpu":2,"gradient_accumulation_steps":2,)"
              R"("managed_gradient_accumulation":true,"optimizer":null,"scheduler":null,"gradient_clipping":1.0,)"
              R"("precision":"params","fp16":{"auto_cast":false,"loss_scale":0.0,"initial_scale":65536.0,)"
              R"("loss_scale_window":1000,"hysteresis":2,"consecutive_hysteresis":false,"min_loss_scale":1.0},)"
              R"("skips_overflow":false,"zero_optimization":{"stage":0,"zero_hpz_partition_size":1,)"
              R"("ignore_unused_parameters":true,"compute_grad_norm":true},"communication_data_type":null,)"
              R"("gradient_allreduce_op":"mean","prescale_gradients":false,"gradient_predivide_factor":1.0,)"
              R"("steps_per_print":0,"wall_clock_breakdown":false,"dump_state":false,"dataloader_drop_last":false,)"
              R"("checkpoint":{"tag_validation":"Warn"},"reports":[]})");
    const std::string other = resolved(
        R"({"train_batch_size": 4, "optimizer": {"type": "RMSprop", "params": {"lr": 1}}, "scheduler": {"type": "StepLR"},
            "bf16": {"enabled": true}, "communication_data_type": "fp16", "gradient_allreduce_op": "sum",
            "checkpoint": {"tag_validation": "FAIL"}, "train_batch_sizes": 4})",
        2);
    for (const char* part :
         {R"("optimizer":{"type":"RMSprop","params":{"lr":1},"core":false})",
          R"("scheduler":{"type":"StepLR","params":{},"core":false})", R"("precision":"bf16")",
          R"("skips_overflow":true)", R"("communication_data_type":"fp16")", R"("gradient_allreduce_op":"sum")",
          R"("tag_validation":"Fail")", R"("reports":[{"key":"train_batch_sizes","kind":"unknown","text":")"}) {
        EXPECT_THAT(other, HasSubstr(part));
    }
    size_t size = 0;
    EXPECT_FAILS(tsr_engine_config(nullptr, 1, nullptr, 0, &size), TSR_E_INVALID_ARGUMENT, "config is NULL");
    EXPECT_FAILS(tsr_engine_config("{\"train_batch_size\": 4}", 0, nullptr, 0, &size), TSR_E_INVALID_ARGUMENT,
                 "ranks is 0");
    EXPECT_FAILS(tsr_engine_config("{\"train_batch_size\": 4}", 1, nullptr, 0, nullptr), TSR_E_INVALID_ARGUMENT,
                 "size is NULL");
    EXPECT_FAILS(tsr_engine_config("{\"train_batch_size\": 4}", 3, nullptr, 0, &size), TSR_E_INVALID_ARGUMENT,
                 "does not equal");
    EXPECT_FAILS(tsr_engine_config("{\"amp\": {\"enabled\": true}}", 1, nullptr, 0, &size), TSR_E_UNSUPPORTED, "amp");
}

TEST(EngineApi, AConfigurationHasAScheduleWithoutAnEngine) {
    api::Owned<tsr_lr_schedule> schedule;
    ASSERT_OK(tsr_engine_config_schedule(
        R"({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 1}}})",
        schedule.out()));
    double lr = 0;
    ASSERT_OK(tsr_lr_schedule_lr_at(schedule, 3, 7, &lr));
    EXPECT_EQ(lr, 2);
    EXPECT_FAILS(tsr_engine_config_schedule("{}", schedule.out()), TSR_E_INVALID_ARGUMENT, "has no \"scheduler\"");
    EXPECT_FAILS(tsr_engine_config_schedule(R"({"scheduler": {"type": "StepLR"}})", schedule.out()), TSR_E_UNSUPPORTED,
                 "has WarmupLR");
    EXPECT_FAILS(tsr_engine_config_schedule(nullptr, schedule.out()), TSR_E_INVALID_ARGUMENT, "config is NULL");
}

// --- the loss scale

TEST(LossScaleApi, FollowsDeepSpeedsRules) {
    tsr_loss_scale_options options;
    ASSERT_OK(tsr_loss_scale_options_init(&options, sizeof options));
    EXPECT_EQ(options.initial, 65536);
    EXPECT_EQ(options.window, 1000);
    EXPECT_EQ(options.hysteresis, 2);
    EXPECT_EQ(options.minimum, 1);
    options.initial = 16;
    options.minimum = 8;
    api::Owned<tsr_loss_scale> scale;
    ASSERT_OK(tsr_loss_scale_create(&options, scale.out()));
    double value = 0;
    ASSERT_OK(tsr_loss_scale_update(scale, 1, &value));
    EXPECT_EQ(value, 16) << "hysteresis";
    ASSERT_OK(tsr_loss_scale_update(scale, 1, nullptr));
    ASSERT_OK(tsr_loss_scale_value(scale, &value));
    EXPECT_EQ(value, 8);
    EXPECT_FAILS(tsr_loss_scale_update(scale, 1, &value), TSR_E_INVALID_STATE, "at its minimum 8");
    EXPECT_FAILS(tsr_loss_scale_update(scale, 2, &value), TSR_E_INVALID_ARGUMENT, "overflow is 2");

    tsr_loss_scale_state state{sizeof(tsr_loss_scale_state), 0, 0, 0, 0};
    ASSERT_OK(tsr_loss_scale_get_state(scale, &state));
    EXPECT_EQ(state.scale, 8);
    EXPECT_EQ(state.iteration, 2);
    EXPECT_EQ(state.last_overflow, 1);
    EXPECT_EQ(state.hysteresis, 1);
    api::Owned<tsr_loss_scale> other;
    ASSERT_OK(tsr_loss_scale_create(nullptr, other.out()));
    ASSERT_OK(tsr_loss_scale_set_state(other, &state));
    ASSERT_OK(tsr_loss_scale_value(other, &value));
    EXPECT_EQ(value, 8);
    state.scale = 0;
    EXPECT_FAILS(tsr_loss_scale_set_state(other, &state), TSR_E_INVALID_ARGUMENT, "saved loss scale");
    EXPECT_FAILS(tsr_loss_scale_set_state(other, nullptr), TSR_E_INVALID_ARGUMENT, "state is NULL");
    options.window = 0;
    EXPECT_FAILS(tsr_loss_scale_create(&options, other.out()), TSR_E_INVALID_ARGUMENT, "loss_scale_window");
    options.window = 1;
    options.restores_every_step = 2;
    EXPECT_FAILS(tsr_loss_scale_create(&options, other.out()), TSR_E_INVALID_ARGUMENT, "restores_every_step is 2");
}

}  // namespace
