// The "scheduler" of a configuration is the schedule of src/optim with the same options.
#include "engine/config_schedule.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "configs.hpp"

namespace tsr {
namespace {

using testing::has;
using testing::parsed;
using testing::refusal_of;

EngineConfig scheduled(const std::string& type, const std::string& params, const std::string& optimizer = "Adam") {
    return parsed(fmt::format(R"({{"optimizer": {{"type": "{}"}}, "scheduler": {{"type": "{}", "params": {}}}}})",
                              optimizer, type, params));
}

std::string text_of(const std::string& type, const std::string& params) {
    return scheduled(type, params).schedule->text;
}

TEST(ConfigSchedule, DefaultsAreThoseOfDeepSpeed) {
    EXPECT_EQ(text_of("WarmupLR", "{}"), warmup_lr({})->text);
    EXPECT_EQ(text_of("WarmupDecayLR", R"({"total_num_steps": 2000})"),
              warmup_lr({.warmup_max_lr = 0.001, .total_num_steps = 2000})->text);
    EXPECT_EQ(text_of("WarmupCosineLR", R"({"total_num_steps": 2000})"),
              warmup_cosine_lr({.total_num_steps = 2000})->text);
    EXPECT_EQ(text_of("OneCycle", R"({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2})"),
              one_cycle_lr({.cycle_min_lr = 0.1, .cycle_max_lr = 0.2})->text);
    EXPECT_EQ(text_of("LRRangeTest", "{}"), lr_range_test(1e-3, 2000, 1, false)->text);
    EXPECT_EQ(parsed(R"({"scheduler": {"type": "WarmupLR"}})").schedule->text, warmup_lr({})->text);
    EXPECT_EQ(parsed(R"({"scheduler": {}})").schedule, nullptr);
}

TEST(ConfigSchedule, EveryParameterIsTaken) {
    const std::string warmup = R"("warmup_min_lr": 0.1, "warmup_max_lr": 0.2, "warmup_num_steps": 30,
        "warmup_type": "linear", "last_batch_iteration": -1)";
    WarmupLrOptions options{0.1, 0.2, 30, LrWarmup::linear, 0};
    EXPECT_EQ(text_of("WarmupLR", "{" + warmup + "}"), warmup_lr(options)->text);
    options.total_num_steps = 70;
    EXPECT_EQ(text_of("WarmupDecayLR", "{\"total_num_steps\": 70, " + warmup + "}"), warmup_lr(options)->text);
    EXPECT_EQ(text_of("WarmupCosineLR", R"({"total_num_steps": 70, "warmup_min_ratio": 0.1, "warmup_num_steps": 30,
                  "cos_min_ratio": 0.2, "warmup_type": "linear"})"),
              warmup_cosine_lr({70, 0.1, 30, 0.2, LrWarmup::linear})->text);
    EXPECT_EQ(text_of("OneCycle", R"({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "decay_lr_rate": 0.3,
                  "cycle_first_step_size": 40, "cycle_second_step_size": 50, "cycle_first_stair_count": 6,
                  "cycle_second_stair_count": 7, "decay_step_size": 8, "cycle_momentum": true, "cycle_min_mom": 0.5,
                  "cycle_max_mom": 0.6, "decay_mom_rate": 0.01})"),
              one_cycle_lr({0.1, 0.2, 0.3, 40, 50, 6, 7, 8, true, 0.5, 0.6, 0.01})->text);
    EXPECT_EQ(text_of("LRRangeTest", R"({"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 20,
                  "lr_range_test_step_rate": 3, "lr_range_test_staircase": true})"),
              lr_range_test(0.1, 20, 3, true)->text);
}

// Which sets both betas of optimizers that have them, and no other momentum.
TEST(ConfigSchedule, OneCycleCyclesTheMomentumOfAdam) {
    const std::string params = R"({"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": true})";
    const EngineConfig adam = scheduled("OneCycle", params);
    EXPECT_TRUE(adam.schedule->momentum);
    EXPECT_EQ(std::get<AdamOptions>(adam.optimizer.value()).beta2, 0.99);
    EXPECT_TRUE(adam.reports.empty());
    const EngineConfig sgd = scheduled("OneCycle", params, "SGD");
    EXPECT_FALSE(sgd.schedule->momentum);
    ASSERT_EQ(sgd.reports.size(), 1U);
    EXPECT_EQ(sgd.reports[0].key, "scheduler.params.cycle_momentum");
    const EngineConfig without =
        scheduled("OneCycle", R"({"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": false})");
    EXPECT_EQ(std::get<AdamOptions>(without.optimizer.value()).beta2, AdamOptions{}.beta2);
}

TEST(ConfigSchedule, UnknownParametersAreReported) {
    const EngineConfig config = scheduled("WarmupLR", R"({"warmup_num_step": 3})");
    ASSERT_EQ(config.reports.size(), 1U);
    EXPECT_PRED2(has, config.reports[0].text, "did you mean \"scheduler.params.warmup_num_steps\"?");
}

TEST(ConfigSchedule, WhatIsWrongIsRefusedByName) {
    struct Case {
        const char* scheduler;
        const char* message;
        Code code = Code::invalid_argument;
    };
    for (const Case& one : {
             Case{R"({"type": "StepLR", "params": {"step_size": 3}})", "\"scheduler.type\" (line 1, column 16)",
                  Code::unsupported},
             Case{R"({"type": "warmuplr"})", "has WarmupLR", Code::unsupported},
             Case{R"({"params": {}})", "\"scheduler.type\" is missing"},
             Case{R"({"type": "WarmupDecayLR"})", "\"scheduler.params.total_num_steps\" is missing"},
             Case{R"({"type": "WarmupCosineLR", "params": {"total_num_steps": 0}})", "at least 1"},
             Case{R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1}})",
                  "\"scheduler.params.cycle_max_lr\" is missing"},
             Case{R"({"type": "WarmupLR", "params": {"warmup_type": "cubic"}})", "\"log\" or \"linear\""},
             Case{R"({"type": "WarmupLR", "params": {"warmup_max_lr": [0.1]}})", "a number"},
             Case{R"({"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}})", "\"auto\" is for programs"},
             Case{R"({"type": "WarmupLR", "params": {"warmup_num_steps": -1}})", "warmup_num_steps"},
             Case{R"({"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}})", "step_size"},
             Case{R"({"type": "WarmupLR", "params": {"last_batch_iteration": 7}})", "comes from a checkpoint",
                  Code::unsupported},
         }) {
        const Error error = refusal_of(fmt::format(R"({{"scheduler": {}}})", one.scheduler));
        EXPECT_EQ(error.code(), one.code) << one.scheduler;
        EXPECT_PRED2(has, error.what(), one.message);
        if (one.code == Code::invalid_argument) {
            EXPECT_PRED2(has, error.what(), "\"scheduler.") << "names the key";
        }
    }
}

}  // namespace
}  // namespace tsr
