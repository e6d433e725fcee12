#include "optim/lr_schedule.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "base/error.hpp"
#include "optim/adam.hpp"
#include "optim/sgd.hpp"

namespace tsr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A parameter, its gradient, and optimizers over them.
struct Model {
    std::array<double, 2> value{1, 1};
    std::array<double, 2> grad{1, 1};

    std::vector<OptimizerParam> params() {
        return {{"w", tensor_of(std::span<double>(value), DType::f64), tensor_of(std::span<double>(grad), DType::f64)}};
    }
    std::shared_ptr<Optimizer> sgd(double lr, double momentum = 0) {
        return std::make_shared<Sgd>(params(), SgdOptions{.lr = lr, .momentum = momentum});
    }
    std::shared_ptr<Optimizer> adam(double lr) { return std::make_shared<Adam>(params(), AdamOptions{.lr = lr}); }
};

LrCurvePtr cycle() { return one_cycle_lr({.cycle_min_lr = 0.1, .cycle_max_lr = 0.5, .cycle_first_step_size = 4}); }

double number(const Optimizer& optimizer, std::string_view name) { return setting<double>(optimizer.settings(), name); }

template <class Call>
void expect_error(Call&& call, Code code, const std::string& said) {
    try {
        call();
        ADD_FAILURE() << "no error: " << said;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), code);
        EXPECT_THAT(error.what(), HasSubstr(said));
    }
}

TEST(LrSchedule, SetsTheRatesOfItsOptimizers) {
    Model model;
    const auto first = model.sgd(0.4);
    const auto second = model.adam(0.2);
    LrSchedule schedule(linear_lr(0.5, 1, 4));
    schedule.attach(first);
    EXPECT_EQ(first->lr(), 0.2);
    schedule.step();
    schedule.attach(second);
    EXPECT_DOUBLE_EQ(second->lr(), 0.2 * 0.625);
    schedule.step();
    EXPECT_DOUBLE_EQ(first->lr(), 0.4 * 0.75);
    EXPECT_DOUBLE_EQ(second->lr(), 0.2 * 0.75);
    schedule.set_steps(4);
    EXPECT_EQ(first->lr(), 0.4);
    EXPECT_EQ(schedule.steps(), 4);
}

TEST(LrSchedule, SetsMomentumAndTheFirstBeta) {
    Model model;
    const auto sgd = model.sgd(0.4, 0.5);
    const auto adam = model.adam(0.4);
    LrSchedule schedule(cycle());
    schedule.attach(sgd);
    schedule.attach(adam);
    EXPECT_EQ(number(*sgd, "momentum"), 0.9);
    schedule.set_steps(4);
    EXPECT_EQ(number(*sgd, "momentum"), 0.8);
    EXPECT_THAT(setting<std::vector<double>>(adam->settings(), "betas"), ElementsAre(0.8, 0.999));
    EXPECT_EQ(sgd->lr(), 0.5);
    sgd->step();
    adam->step();
}

TEST(LrSchedule, OptimizersThatItCannotSetAreRefusedUnchanged) {
    Model model;
    const auto plain = model.sgd(0.4);
    LrSchedule schedule(cycle());
    expect_error([&] { schedule.attach(plain); }, Code::invalid_argument, "has no momentum");
    EXPECT_EQ(plain->lr(), 0.4);
    EXPECT_TRUE(schedule.state().base_lrs.empty());
    const std::array<int64_t, 1> begin{5};
    LrSchedule later(sequential_lr({constant_lr(1, 1), cycle()}, begin));
    expect_error([&] { later.attach(plain); }, Code::invalid_argument, "has no momentum");
    const auto other = model.sgd(0.4, 0.5);
    schedule.attach(other);
    expect_error([&] { schedule.attach(other); }, Code::invalid_state, "attached already");
    expect_error([&] { other->set_momentum(1); }, Code::invalid_argument, "the momentum is 1");
}

TEST(LrSchedule, DestroyedOptimizersAreLeftOut) {
    Model model;
    auto first = model.sgd(0.4);
    const auto second = model.sgd(0.2);
    LrSchedule schedule(step_decay_lr(1, 0.5));
    schedule.attach(first);
    schedule.attach(second);
    first.reset();
    schedule.step();
    EXPECT_EQ(second->lr(), 0.1);
}

TEST(LrSchedule, AfterAFailedStepNothingHasChanged) {
    Model model;
    const auto optimizer = model.sgd(1);
    LrSchedule schedule(exponential_lr(1e200));
    schedule.attach(optimizer);
    schedule.step();
    expect_error([&] { schedule.step(); }, Code::invalid_argument, "would be inf at step 2");
    EXPECT_EQ(schedule.steps(), 1);
    EXPECT_EQ(optimizer->lr(), 1e200);
    expect_error([&] { schedule.set_steps(-1); }, Code::invalid_argument, "the step is -1");
    LrSchedule last(constant_lr(1, 1));
    last.set_steps(std::numeric_limits<int64_t>::max());
    expect_error([&] { last.step(); }, Code::invalid_state, "the last one");
}

TEST(LrSchedule, AStateBringsBackStepAndRates) {
    Model model;
    const auto optimizer = model.sgd(0.4);
    LrSchedule schedule(cosine_lr(10, 0.01));
    schedule.attach(optimizer);
    schedule.set_steps(3);
    const LrScheduleState saved = schedule.state();

    const auto resumed = model.sgd(0.1);
    LrSchedule other(cosine_lr(10, 0.01));
    other.attach(resumed);
    other.load_state(saved);
    EXPECT_EQ(other.steps(), 3);
    for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(resumed->lr(), optimizer->lr()) << "the same bits";
        schedule.step();
        other.step();
    }
}

TEST(LrSchedule, AStateOfAnotherScheduleIsRefusedUnchanged) {
    Model model;
    const auto optimizer = model.sgd(0.4);
    LrSchedule schedule(cosine_lr(10, 0));
    schedule.attach(optimizer);
    const LrScheduleState good = schedule.state();
    const auto refused = [&](LrScheduleState state, const std::string& said) {
        expect_error([&] { schedule.load_state(state); }, Code::mismatch, said);
        EXPECT_EQ(schedule.steps(), 0);
        EXPECT_EQ(schedule.state().base_lrs, good.base_lrs);
    };
    refused({"cosine(total_steps=11, min_lr=0)", 3, {0.4}}, "belongs to the schedule cosine(total_steps=11, min_lr=0)");
    refused({good.text, 3, {}}, "has 0 optimizers, but this one has 1");
    refused({good.text, 3, {0.4, 0.4}}, "has 2 optimizers");
    refused({good.text, -1, {0.4}}, "is at step -1");
    refused({good.text, 3, {-0.4}}, "base learning rate that is negative");
    refused({good.text, 3, {std::numeric_limits<double>::quiet_NaN()}}, "not finite");
    EXPECT_NO_THROW(schedule.load_state({good.text, 3, {0.2}}));
    EXPECT_EQ(schedule.state().base_lrs, std::vector{0.2});
}

}  // namespace
}  // namespace tsr
