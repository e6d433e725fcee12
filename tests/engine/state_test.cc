// What a state has of an engine, and what a load of it refuses.
#include "engine/state.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "toy.hpp"

namespace tsr {
namespace {

using testing::expect_error;
using testing::Params;
using testing::pass_with;

constexpr const char* optimizer = R"("train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
    "gradient_clipping": 0, "optimizer": {"type": "Adam", "params": {"lr": 0.5}})";

// An engine of one rank over a parameter of three elements.
struct Trained {
    Params<float> params;
    std::shared_ptr<Engine> engine;

    explicit Trained(const std::string& more = "") {
        params.add(0, "w", {3}, 1.0F);
        engine =
            std::make_shared<Engine>(Communicator::self(), params.in_units(), fmt::format("{{{}{}}}", optimizer, more));
    }
    void pass(float gradient) const {
        pass_with<float>(*engine, [&](size_t, std::span<float> grad) { std::ranges::fill(grad, gradient); });
        (void)engine->step();
    }
    void step(float gradient = 1) const {
        pass(gradient);
        pass(gradient);
    }
};

constexpr const char* fp16 = R"(, "fp16": {"enabled": true, "initial_scale_power": 4, "hysteresis": 1},
    "communication_data_type": "fp32")";
constexpr const char* scheduler = R"(, "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 1}})";

TEST(EngineState, HasAllThatAnEngineTrainsAndCounts) {
    const Trained trained(scheduler);
    State state;
    add_engine(state, "e", trained.engine);
    EXPECT_TRUE(state.tensors().contains("e.model.w"));
    EXPECT_TRUE(state.tensors().contains("e.optim.state.w.exp_avg"));
    trained.step();
    trained.step();
    const Values values = state.collect();
    EXPECT_EQ(values.at("e.engine.global_steps"), Json(2));
    EXPECT_EQ(values.at("e.engine.micro_steps"), Json(4));
    EXPECT_EQ(values.at("e.engine.global_samples"), Json(4));
    EXPECT_EQ(values.at("e.engine.skipped_steps"), Json(0));
    EXPECT_EQ(values.at("e.engine.loss_scale_dynamic"), Json(false));
    EXPECT_EQ(values.at("e.schedule.steps"), Json(2));
    EXPECT_TRUE(values.contains("e.optim.param_groups.0.lr"));
}

TEST(EngineState, TheValuesOfALoadAreTaken) {
    const Trained saved(std::string(scheduler) + fp16);
    State from;
    add_engine(from, "e", saved.engine);
    saved.step();
    saved.step(std::numeric_limits<float>::infinity());
    const Trained loaded(std::string(scheduler) + fp16);
    State to;
    add_engine(to, "e", loaded.engine);
    ASSERT_EQ(loaded.engine->loss_scale().scale(), 16);
    const Values values = from.collect();
    to.check(values, {});
    to.apply(values, {});
    EXPECT_EQ(loaded.engine->counters(), saved.engine->counters());
    EXPECT_EQ(loaded.engine->counters().skipped_steps, 1);
    EXPECT_EQ(loaded.engine->loss_scale().scale(), 8);
    EXPECT_EQ(loaded.engine->loss_scale().state().iteration, 2);
    EXPECT_EQ(loaded.engine->loss_scale().state().last_overflow, 1);
    EXPECT_EQ(loaded.engine->schedule()->steps(), 1);
    EXPECT_EQ(loaded.engine->lr(), saved.engine->lr());
}

// Another precision has another scale.
TEST(EngineState, OnlyADynamicScaleContinuesADynamicOne) {
    const Trained scaled(fp16);
    scaled.step(std::numeric_limits<float>::infinity());
    const Trained fixed(R"(, "fp16": {"enabled": true, "loss_scale": 4}, "communication_data_type": "fp32")");
    fixed.engine->restore(scaled.engine->state());
    EXPECT_EQ(fixed.engine->loss_scale().scale(), 4);
    EXPECT_EQ(fixed.engine->counters().skipped_steps, 1);
    const Trained plain;
    const Trained fresh(fp16);
    fresh.engine->restore(plain.engine->state());
    EXPECT_EQ(fresh.engine->loss_scale().scale(), 16);
}

TEST(EngineState, GradientsThatWaitForAStepAreNotSaved) {
    const Trained trained;
    State state;
    add_engine(state, "e", trained.engine);
    const Engine::State before = trained.engine->state();
    trained.pass(1);
    for (const Error& error : {expect_error([&] { (void)state.collect(); }, Code::invalid_state),
                               expect_error([&] { trained.engine->restore(before); }, Code::invalid_state)}) {
        EXPECT_NE(std::string(error.what()).find("gradients of 1 backward passes wait"), std::string::npos)
            << error.what();
    }
    trained.pass(1);
    EXPECT_NO_THROW((void)state.collect());
}

TEST(EngineState, ValuesOutOfRangeAreRefusedAndChangeNothing) {
    const Trained trained(fp16);
    trained.step();
    const Engine::State good = trained.engine->state();
    const auto refused = [&](auto&& spoil) {
        Engine::State bad = good;
        spoil(bad);
        (void)expect_error([&] { trained.engine->check_state(bad); }, Code::invalid_argument);
        (void)expect_error([&] { trained.engine->restore(bad); }, Code::invalid_argument);
        EXPECT_EQ(trained.engine->counters(), good.counters);
        EXPECT_EQ(trained.engine->loss_scale().scale(), good.scale.scale);
    };
    refused([](Engine::State& bad) { bad.counters.global_steps = -1; });
    refused([](Engine::State& bad) { bad.counters.global_samples = -1; });
    refused([](Engine::State& bad) { bad.counters.skipped_steps = 2; });
    refused([](Engine::State& bad) { bad.counters.micro_steps = -1; });
    refused([](Engine::State& bad) { bad.scale.scale = 0; });
    refused([](Engine::State& bad) { bad.scale.hysteresis = 0; });
    refused([](Engine::State& bad) { bad.scale.last_overflow = 5; });
}

TEST(EngineState, DamagedCountsDoNotOverflow) {
    constexpr int64_t last = std::numeric_limits<int64_t>::max();
    const Trained trained(fp16);
    State state;
    add_engine(state, "e", trained.engine);
    Values values = state.collect();
    for (const char* name :
         {"global_steps", "global_samples", "skipped_steps", "micro_steps", "loss_scale_iteration"}) {
        values.at(fmt::format("e.engine.{}", name)) = Json(last);
    }
    state.check(values, {});
    state.apply(values, {});
    trained.step(std::numeric_limits<float>::infinity());
    const auto [steps, samples, skipped, micro] = trained.engine->counters();
    EXPECT_EQ(std::min({steps, samples, skipped, micro}), last);
    state.check(state.collect(), {});
}

TEST(EngineState, SavedValuesOfAnotherTypeAreAMismatch) {
    const Trained trained;
    State state;
    add_engine(state, "e", trained.engine);
    Values values = state.collect();
    values["e.engine.loss_scale_dynamic"] = Json(1);
    const Error error = expect_error([&] { state.check(values, {}); }, Code::mismatch);
    EXPECT_NE(std::string(error.what()).find("e.engine.loss_scale_dynamic"), std::string::npos) << error.what();
    values = state.collect();
    values["e.engine.global_steps"] = Json("two");
    (void)expect_error([&] { state.check(values, {}); }, Code::invalid_argument);
}

}  // namespace
}  // namespace tsr
