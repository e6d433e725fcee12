// What the keys of a configuration do: honoured, refused, without effect, or unknown.
#include "engine/config.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "configs.hpp"

namespace tsr {
namespace {

using testing::has;
using testing::parsed;
using testing::refusal_of;

const AdamOptions& adam_of(const EngineConfig& config) { return std::get<AdamOptions>(config.optimizer.value()); }
const SgdOptions& sgd_of(const EngineConfig& config) { return std::get<SgdOptions>(config.optimizer.value()); }

std::vector<std::string> keys_of(const EngineConfig& config, ReportKind kind) {
    std::vector<std::string> keys;
    for (const ConfigReport& report : config.reports) {
        if (report.kind == kind) keys.push_back(report.key);
    }
    return keys;
}

TEST(Config, AnEmptyOneHasDeepSpeedsDefaults) {
    const EngineConfig config = parsed("{}");
    EXPECT_FALSE(config.optimizer);
    EXPECT_EQ(config.gradient_clipping, 1.0);
    EXPECT_EQ(config.stage, 0);
    EXPECT_EQ(config.op, ReduceOp::avg);
    EXPECT_EQ(config.precision, Precision::of_params);
    EXPECT_FALSE(config.skips_overflow);
    EXPECT_TRUE(config.computes_norm);
    EXPECT_TRUE(config.fills_missing);
    EXPECT_EQ(config.loss_scale.fixed, 0);
    EXPECT_EQ(config.loss_scale.initial, 65536);
    EXPECT_EQ(config.loss_scale.window, 1000);
    EXPECT_EQ(config.loss_scale.hysteresis, 2);
    EXPECT_EQ(config.loss_scale.minimum, 1);
    EXPECT_TRUE(config.reports.empty());
}

TEST(Config, AdamDecaysDecoupledUnlessTheConfigSaysOtherwise) {
    EXPECT_EQ(adam_of(parsed(R"({"optimizer": {"type": "Adam"}})")).decay, Decay::decoupled);
    EXPECT_EQ(adam_of(parsed(R"({"optimizer": {"type": "adamw"}})")).decay, Decay::decoupled);
    EXPECT_EQ(adam_of(parsed(R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}})")).decay,
              Decay::in_gradient);
    EXPECT_EQ(adam_of(parsed(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})")).decay,
              Decay::decoupled);
}

TEST(Config, AdamTakesItsParameters) {
    const AdamOptions adam = adam_of(parsed(
        R"({"optimizer": {"type": "Adam", "params": {"lr": 2, "betas": [0.5, 0.25], "eps": 1e-3, "weight_decay": 0.5}}})"));
    EXPECT_EQ(adam.lr, 2);
    EXPECT_EQ(adam.beta1, 0.5);
    EXPECT_EQ(adam.beta2, 0.25);
    EXPECT_EQ(adam.eps, 1e-3);
    EXPECT_EQ(adam.weight_decay, 0.5);
}

TEST(Config, TheDefaultDecayIsThatOfDeepSpeedsImplementation) {
    EXPECT_EQ(adam_of(parsed(R"({"optimizer": {"type": "AdamW"}})")).weight_decay, 0);
    EXPECT_EQ(adam_of(parsed(R"({"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}})")).weight_decay,
              0.01);
}

TEST(Config, SgdTakesItsParameters) {
    const SgdOptions sgd = sgd_of(parsed(
        R"({"optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "nesterov": true}}})"));
    EXPECT_EQ(sgd.lr, 0.5);
    EXPECT_EQ(sgd.momentum, 0.9);
    EXPECT_EQ(sgd.weight_decay, 0.1);
    EXPECT_TRUE(sgd.nesterov);
}

TEST(Config, AdagradTakesItsParameters) {
    const auto adagrad_of = [](std::string_view text) { return std::get<AdagradOptions>(*parsed(text).optimizer); };
    const AdagradOptions plain = adagrad_of(R"({"optimizer": {"type": "AdaGrad"}})");
    EXPECT_EQ(plain.lr, 0.01);
    EXPECT_EQ(plain.eps, 1e-10);
    const AdagradOptions all = adagrad_of(
        R"({"optimizer": {"type": "Adagrad", "params": {"lr": 0.5, "lr_decay": 0.1, "weight_decay": 0.2,
            "initial_accumulator_value": 0.3, "eps": 0.4}}})");
    EXPECT_EQ(all.lr, 0.5);
    EXPECT_EQ(all.lr_decay, 0.1);
    EXPECT_EQ(all.weight_decay, 0.2);
    EXPECT_EQ(all.initial_accumulator_value, 0.3);
    EXPECT_EQ(all.eps, 0.4);
}

TEST(Config, LionTakesItsParameters) {
    const auto lion_of = [](std::string_view text) { return std::get<LionOptions>(*parsed(text).optimizer); };
    const LionOptions plain = lion_of(R"({"optimizer": {"type": "Lion", "params": {}}})");
    EXPECT_EQ(plain.lr, 1e-4);
    EXPECT_EQ(plain.beta2, 0.99);
    const LionOptions all =
        lion_of(R"({"optimizer": {"type": "lion", "params": {"lr": 0.5, "betas": [0.1, 0.2], "weight_decay": 0.3}}})");
    EXPECT_EQ(all.lr, 0.5);
    EXPECT_EQ(all.beta1, 0.1);
    EXPECT_EQ(all.beta2, 0.2);
    EXPECT_EQ(all.weight_decay, 0.3);
}

TEST(Config, LambTakesItsParameters) {
    const auto lamb_of = [](std::string_view text) { return std::get<LambOptions>(*parsed(text).optimizer); };
    const LambOptions plain = lamb_of(R"({"optimizer": {"type": "LAMB"}})");
    EXPECT_EQ(plain.lr, 1e-3);
    EXPECT_EQ(plain.max_coeff, 10);
    EXPECT_EQ(plain.min_coeff, 0.01);
    EXPECT_TRUE(plain.bias_correction);
    const LambOptions all = lamb_of(
        R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.5, "betas": [0.1, 0.2], "eps": 0.3, "weight_decay": 0.4,
            "bias_correction": false, "max_coeff": 0.6, "min_coeff": 0.5, "amsgrad": false, "eps_inside_sqrt": false}}})");
    EXPECT_EQ(all.lr, 0.5);
    EXPECT_EQ(all.beta1, 0.1);
    EXPECT_EQ(all.beta2, 0.2);
    EXPECT_EQ(all.eps, 0.3);
    EXPECT_EQ(all.weight_decay, 0.4);
    EXPECT_FALSE(all.bias_correction);
    EXPECT_EQ(all.max_coeff, 0.6);
    EXPECT_EQ(all.min_coeff, 0.5);
}

TEST(Config, ZeroOptimizationMayBeABoolean) {
    const EngineConfig on = parsed(R"({"zero_optimization": true})");
    EXPECT_EQ(on.stage, 1);
    ASSERT_EQ(on.reports.size(), 1U);
    EXPECT_EQ(on.reports[0].kind, ReportKind::deprecated);
    EXPECT_EQ(
        on.reports[0].text,
        "config key \"zero_optimization\" (line 1, column 2) is deprecated: write {\"stage\": 1}, which it means");
    EXPECT_EQ(parsed(R"({"zero_optimization": false})").stage, 0);
}

TEST(Config, TakesTheRest) {
    const EngineConfig config = parsed(R"({
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4.0, "gradient_accumulation_steps": 8,
        "zero_optimization": {"stage": 2, "compute_grad_norm": false, "ignore_unused_parameters": false},
        "gradient_clipping": 0, "gradient_predivide_factor": 4, "gradient_allreduce_op": "sum",
        "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"},
        "managed_gradient_accumulation": false, "steps_per_print": 10, "dump_state": true,
        "wall_clock_breakdown": true,
        "fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 4, "loss_scale_window": 50, "hysteresis": 3,
                 "consecutive_hysteresis": true, "min_loss_scale": 0.5}})");
    EXPECT_EQ(config.batch.train, 64);
    EXPECT_EQ(config.batch.micro, 4);
    EXPECT_EQ(config.batch.accumulation, 8);
    EXPECT_EQ(config.stage, 2);
    EXPECT_TRUE(config.reduces_each_pass());
    EXPECT_FALSE(config.computes_norm);
    EXPECT_FALSE(config.fills_missing);
    EXPECT_EQ(config.gradient_clipping, 0);
    EXPECT_EQ(config.predivide, 4);
    EXPECT_EQ(config.op, ReduceOp::sum);
    EXPECT_EQ(config.grad_dtype, DType::bf16);
    EXPECT_TRUE(config.every_step_is_boundary);
    EXPECT_EQ(config.steps_per_print, 10);
    EXPECT_TRUE(config.wall_clock_breakdown);
    EXPECT_TRUE(config.dump_state);
    EXPECT_EQ(config.precision, Precision::f16);
    EXPECT_TRUE(config.skips_overflow);
    EXPECT_EQ(config.loss_scale.fixed, 128);
    EXPECT_EQ(config.loss_scale.initial, 16);
    EXPECT_EQ(config.loss_scale.window, 50);
    EXPECT_EQ(config.loss_scale.hysteresis, 3);
    EXPECT_TRUE(config.loss_scale.restores_every_step);
    EXPECT_EQ(config.loss_scale.minimum, 0.5);
    EXPECT_TRUE(config.reports.empty());
}

TEST(Config, Bf16HasTwoNames) {
    EXPECT_EQ(parsed(R"({"bf16": {"enabled": true}})").precision, Precision::bf16);
    const EngineConfig config = parsed(R"({"bfloat16": {"enabled": true, "check_grad_overflow": false}})");
    EXPECT_EQ(config.precision, Precision::bf16);
    EXPECT_FALSE(config.skips_overflow);
}

TEST(Config, SecondaryPartitionsAreOfStage3) {
    EXPECT_EQ(parsed(R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})").secondary_ranks, 2);
    const EngineConfig config = parsed(R"({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}})");
    EXPECT_EQ(config.secondary_ranks, 1);
    EXPECT_EQ(keys_of(config, ReportKind::no_effect),
              std::vector<std::string>{"zero_optimization.zero_hpz_partition_size"});
}

TEST(Config, AutoIsTheDefaultInsideSections) {
    const EngineConfig config = parsed(
        R"({"fp16": {"enabled": true, "loss_scale_window": "auto"}, "zero_optimization": {"stage": 2,
            "reduce_bucket_size": "auto"}})");
    EXPECT_EQ(config.precision, Precision::f16);
    EXPECT_EQ(config.loss_scale.window, 1000);
    EXPECT_EQ(config.stage, 2);
    EXPECT_TRUE(config.reports.empty());
    EXPECT_STREQ(
        refusal_of(R"({"train_batch_size": "auto"})").what(),
        "config key \"train_batch_size\" (line 1, column 2) is \"auto\"; \"auto\" is for programs that fill it in "
        "before they create an engine; give a value");
    EXPECT_EQ(refusal_of(R"({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}})").code(),
              Code::invalid_argument);
}

TEST(Config, AutoIsNoPrecisionAndNoStage) {
    for (const std::string_view text :
         {R"({"fp16": {"enabled": "auto"}})", R"({"bf16": {"enabled": "auto"}})",
          R"({"bfloat16": {"enabled": "auto"}})", R"({"zero_optimization": {"stage": "auto"}})"}) {
        const Error error = refusal_of(text);
        EXPECT_EQ(error.code(), Code::invalid_argument) << text;
        EXPECT_TRUE(has(error.what(), "is \"auto\"; \"auto\" is for programs that fill it in")) << error.what();
    }
}

TEST(Config, UnknownParametersAreReportedWithTheNearestOrTheKnown) {
    const EngineConfig config = parsed(R"({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"num_steps": 5}}})");
    ASSERT_EQ(keys_of(config, ReportKind::unknown),
              (std::vector<std::string>{"optimizer.params.eps", "scheduler.params.num_steps"}));
    EXPECT_TRUE(has(config.reports[0].text, "is unknown and ignored; known are lr, weight_decay, betas"))
        << config.reports[0].text;
    EXPECT_TRUE(has(config.reports[1].text, "did you mean \"scheduler.params.warmup_num_steps\"?"))
        << config.reports[1].text;
}

TEST(Config, OtherImplementationsOfAnOptimizerAreRefusedWithItsName) {
    const auto said = [](const char* type) {
        return std::string(refusal_of(fmt::format(R"({{"optimizer": {{"type": "{}"}}}})", type)).what());
    };
    EXPECT_TRUE(has(said("FusedAdam"), "choose one of them; did you mean \"Adam\"?")) << said("FusedAdam");
    EXPECT_TRUE(has(said("fused_lamb"), "did you mean \"Lamb\"?")) << said("fused_lamb");
    EXPECT_TRUE(has(said("DeepSpeedCPUAdam"), "did you mean \"Adam\"?")) << said("DeepSpeedCPUAdam");
    EXPECT_FALSE(has(said("OneBitAdam"), "did you mean")) << "it is another optimizer";
}

TEST(Config, UnknownKeysAreReportedWithTheNearest) {
    const EngineConfig config = parsed(R"({
        "train_batch_sise": 8,
        "zero_optimization": {"stag": 2, "xyz": 1},
        "optimizer": {"type": "SGD", "params": {"weigth_decay": 1}}})");
    EXPECT_EQ(keys_of(config, ReportKind::unknown),
              (std::vector<std::string>{"optimizer.params.weigth_decay", "zero_optimization.stag",
                                        "zero_optimization.xyz", "train_batch_sise"}));
    EXPECT_EQ(config.reports[0].text,
              "config key \"optimizer.params.weigth_decay\" (line 4, column 49) is unknown and ignored; did you mean "
              "\"optimizer.params.weight_decay\"?");
    EXPECT_PRED2(has, config.reports[1].text, "did you mean \"zero_optimization.stage\"?");
    EXPECT_PRED2(has, config.reports[2].text, "is unknown and ignored");
    EXPECT_FALSE(has(config.reports[2].text, "did you mean"));
    EXPECT_PRED2(has, config.reports[3].text, "did you mean \"train_batch_size\"?");
}

TEST(Config, KeysWithoutEffectAreReported) {
    const EngineConfig config = parsed(R"({
        "zero_optimization": {"stage": 2, "contiguous_gradients": false, "overlap_comm": true, "reduce_bucket_size": 5e8,
                              "offload_optimizer": {"device": "cpu", "pin_memory": true}, "cpu_offload": true},
        "wall_clock_breakdown": true, "tensorboard": {"enabled": true}, "wandb": {"enabled": false},
        "memory_breakdown": false, "activation_checkpointing": {"partition_activations": true},
        "checkpoint": {"tag_validation": "FAIL"}, "dataloader_drop_last": true, "fp16": {"auto_cast": true}})");
    EXPECT_EQ(config.tag_validation, TagValidation::fail);
    auto keys = keys_of(config, ReportKind::no_effect);
    std::ranges::sort(keys);
    EXPECT_EQ(keys,
              (std::vector<std::string>{
                  "activation_checkpointing", "checkpoint.tag_validation", "dataloader_drop_last", "fp16.auto_cast",
                  "tensorboard", "wall_clock_breakdown", "zero_optimization.contiguous_gradients",
                  "zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.pin_memory",
                  "zero_optimization.overlap_comm", "zero_optimization.reduce_bucket_size"}));
    EXPECT_EQ(keys_of(config, ReportKind::deprecated), std::vector<std::string>{"zero_optimization.cpu_offload"});
}

// What an engine of another library may have is left to it.
TEST(Config, OthersHaveOptimizersAndSchedulersOfTheirOwn) {
    const auto read = [](std::string_view text) { return EngineConfig::of(ConfigText(text), ConfigReader::other); };
    const EngineConfig config = read(R"({
        "optimizer": {"type": "RMSprop", "params": {"alpha": 0.5, "foreach": true}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 3}}, "unknown": 1,
        "fp16": {"enabled": true, "auto_cast": true}, "dataloader_drop_last": true,
        "checkpoint": {"tag_validation": "ignore"}})");
    EXPECT_EQ(config.optimizer_part.value().type, "RMSprop");
    EXPECT_EQ(config.optimizer_part.value().params.dump(), R"({"alpha":0.5,"foreach":true})");
    EXPECT_FALSE(config.optimizer_part.value().is_own());
    EXPECT_FALSE(config.optimizer);
    EXPECT_EQ(config.scheduler_part.value().type, "StepLR");
    EXPECT_FALSE(config.scheduler_part.value().is_own());
    EXPECT_EQ(config.schedule, nullptr);
    EXPECT_TRUE(config.auto_casts);
    EXPECT_TRUE(config.drops_last);
    EXPECT_EQ(config.tag_validation, TagValidation::ignore);
    ASSERT_EQ(config.reports.size(), 1U);
    EXPECT_EQ(config.reports[0].key, "unknown");
    // Tessera has the type, but not this option of it.
    const EngineConfig amsgrad = read(R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})");
    EXPECT_FALSE(amsgrad.optimizer_part.value().is_own());
    const EngineConfig own = read(R"({"optimizer": {"type": "Adam", "params": {"fused": true}}})");
    EXPECT_TRUE(own.optimizer_part.value().is_own());
    EXPECT_TRUE(own.reports.empty());
    for (const char* text : {R"({"optimizer": {"type": "RMSprop", "params": {"max_grad_norm": 1}}})",
                             R"({"optimizer": {"type": "Adam", "params": {"lr": -1}}})",
                             R"({"scheduler": {"params": {}}})", R"({"zero_optimization": {"stage": 4}})"}) {
        EXPECT_THROW((void)read(text), Error) << text;
    }
}

struct Refused {
    const char* config;
    const char* message;  // a part of it
    Code code;
};

TEST(Config, WhatTesseraDoesNotDoIsRefusedByName) {
    for (const char* type : {"Muon", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "RMSprop"}) {
        const Error error = refusal_of(fmt::format(R"({{"optimizer": {{"type": "{}"}}}})", type));
        EXPECT_EQ(error.code(), Code::unsupported);
        EXPECT_EQ(std::string(error.what()),
                  fmt::format(
                      "config key \"optimizer.type\" (line 1, column 16) is \"{}\"; Tessera's engine has Adam, AdamW, "
                      "SGD, Adagrad, Lion and Lamb; choose one of them",
                      type));
    }
    for (const char* key : {"amp", "torch_autocast", "nebula", "compression_training", "quantize_training",
                            "sparse_gradients", "eigenvalue", "sparse_attention", "elasticity", "graph_harvesting",
                            "curriculum_learning", "progressive_layer_drop"}) {
        const Error error = refusal_of(fmt::format(R"({{"{}": {{"enabled": true}}}})", key));
        EXPECT_EQ(error.code(), Code::unsupported) << key;
        EXPECT_PRED2(has, error.what(), fmt::format("config key \"{}\" (line 1, column 2)", key));
        EXPECT_NO_THROW((void)parsed(fmt::format(R"({{"{}": {{"enabled": false}}}})", key)));
    }
    for (const Refused& one : {
             Refused{R"({"zero_optimization": {"zero_quantized_weights": true}})", "does not quantise",
                     Code::unsupported},
             Refused{R"({"zero_optimization": {"mics_shard_size": 2}})", "use FSDP with shard_ranks",
                     Code::unsupported},
             Refused{R"({"zero_optimization": {"offload_param": {"device": "nvme"}}})", "does not offload to files",
                     Code::unsupported},
             Refused{R"({"fp16": {"fp16_master_weights_and_grads": true}})", "update f32 and f64", Code::unsupported},
             Refused{R"({"bf16": {"bf16_optimizer_states": true}})", "keep their moments", Code::unsupported},
             Refused{R"({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}})", "set \"gradient_clipping\"",
                     Code::unsupported},
             Refused{R"({"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 0}}})", "set \"gradient_clipping\"",
                     Code::unsupported},
             Refused{R"({"optimizer": {"type": "Lamb", "params": {"eps_inside_sqrt": true}}})", "to the square root",
                     Code::unsupported},
             Refused{R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})", "no amsgrad",
                     Code::unsupported},
             Refused{R"({"optimizer": {"type": "Adam", "params": {"bias_correction": false}}})", "corrects its moments",
                     Code::unsupported},
             Refused{R"({"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}})",
                     "in the dtype in which they accumulate", Code::unsupported},
         }) {
        const Error error = refusal_of(one.config);
        EXPECT_EQ(error.code(), one.code) << one.config;
        EXPECT_PRED2(has, error.what(), one.message);
    }
}

TEST(Config, WhatIsMalformedOrContradictsItselfIsRefused) {
    for (const Refused& one : {
             Refused{
                 R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})", "\"fp16.enabled\" is true as well", {}},
             Refused{R"({"bf16": {}, "bfloat16": {}})", "another name of \"bf16\"", {}},
             Refused{R"({"zero_optimization": {"stage": 4}})", "stages are 0 to 3", {}},
             Refused{R"({"zero_optimization": {"stage": -1}})", "at least 0", {}},
             Refused{R"({"zero_optimization": {"stage": 1.5}})", "a whole number", {}},
             Refused{R"({"zero_optimization": 2})", "an object", {}},
             Refused{R"({"zero_optimization": {"stage": 3, "compute_grad_norm": false}})", "stages 1 and 2", {}},
             Refused{R"({"zero_optimization": {"stage": 2, "compute_grad_norm": false}})",
                     "\"gradient_clipping\" to 0",
                     {}},
             Refused{R"({"zero_optimization": {"offload_param": {"device": "disk"}}})", "\"none\" or \"cpu\"", {}},
             Refused{R"({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"})", "stage 3 averages", {}},
             Refused{R"({"gradient_allreduce_op": "max"})", "\"mean\" or \"sum\"", {}},
             Refused{R"({"gradient_allreduce_op": "sum", "prescale_gradients": true})", "one of the two", {}},
             Refused{R"({"gradient_predivide_factor": 0})", "a positive normal f32 number", {}},
             Refused{R"({"gradient_clipping": -1})", "at least 0", {}},
             Refused{R"({"gradient_clipping": true})", "a number", {}},
             Refused{R"({"communication_data_type": "int8"})", "\"fp32\", \"fp16\" or \"bf16\"", {}},
             Refused{R"({"fp16": {"loss_scale": true}})", "a number", {}},
             Refused{R"({"fp16": {"initial_scale_power": 128}})", "at most 127", {}},
             Refused{R"({"fp16": {"loss_scale_window": 0}})", "at least 1", {}},
             Refused{R"({"fp16": {"hysteresis": 0}})", "at least 1", {}},
             Refused{R"({"fp16": {"min_loss_scale": 0}})", "a positive normal f32 number", {}},
             Refused{R"({"fp16": {"min_loss_scale": 65537}})", "at most this", {}},
             Refused{R"({"fp16": {"initial_scale_power": 3, "min_loss_scale": 9}})", "\"initial_scale_power\", 8", {}},
             Refused{R"({"fp16": {"loss_scale": 1e308}})", "0 (dynamic) or a positive normal f32 number", {}},
             Refused{R"({"fp16": {"loss_scale": -1}})", "0 (dynamic) or a positive normal f32 number", {}},
             Refused{R"({"gradient_predivide_factor": -1})", "a positive normal f32 number", {}},
             Refused{R"({"gradient_predivide_factor": 1e-320})", "a positive normal f32 number", {}},
             Refused{R"({"gradient_predivide_factor": 1e308})", "a positive normal f32 number", {}},
             Refused{R"({"fp16": {"enabled": 1}})", "true or false", {}},
             Refused{R"({"fp16": true})", "an object", {}},
             Refused{R"({"train_batch_size": 1e40})", "a whole number below 2^63", {}},
             Refused{R"({"train_batch_size": 18446744073709551615})", "a whole number below 2^63", {}},
             Refused{R"({"optimizer": {"params": {}}})", "config key \"optimizer.type\" is missing", {}},
             Refused{R"({"optimizer": {"type": 3}})", "a string", {}},
             Refused{R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}})", "two numbers", {}},
             Refused{R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}})", "below 1", {}},
             Refused{R"({"optimizer": {"type": "Adam", "params": {"lr": -1}}})", "at least 0", {}},
             Refused{R"({"optimizer": {"type": "Adagrad", "params": {"lr_decay": -1}}})", "at least 0", {}},
             Refused{R"({"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.99, 1]}}})", "two numbers", {}},
             Refused{R"({"optimizer": {"type": "Lamb", "params": {"min_coeff": 11}}})", "at most \"max_coeff\"", {}},
             Refused{R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})", "\"momentum\" above 0", {}},
             Refused{R"({"checkpoint": {"tag_validation": "maybe"}})", "\"Ignore\", \"Warn\" or \"Fail\"", {}},
         }) {
        const Error error = refusal_of(one.config);
        EXPECT_EQ(error.code(), Code::invalid_argument) << one.config << ": " << error.what();
        EXPECT_PRED2(has, error.what(), one.message) << one.config;
    }
}

}  // namespace
}  // namespace tsr
