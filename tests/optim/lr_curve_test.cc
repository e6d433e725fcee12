#include "optim/lr_curve.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "lr_golden.hpp"

namespace tsr {
namespace {

using ::testing::HasSubstr;

constexpr int64_t most = std::numeric_limits<int64_t>::max();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinite = std::numeric_limits<double>::infinity();

void expect_rates(const LrCurvePtr& curve, const golden::Rates& rates) {
    for (int step = 0; step < golden::lr_steps; ++step) {
        EXPECT_NEAR(lr_at(*curve, step, golden::base_lr), rates[static_cast<size_t>(step)], 1e-15)
            << curve->text << " at step " << step;
    }
}

void expect_momenta(const LrCurvePtr& curve, const golden::Rates& momenta) {
    for (int step = 0; step < golden::lr_steps; ++step) {
        const auto momentum = momentum_at(*curve, step);
        ASSERT_TRUE(momentum.has_value());
        EXPECT_NEAR(*momentum, momenta[static_cast<size_t>(step)], 1e-15) << curve->text << " at step " << step;
    }
}

template <class Make>
void expect_refused(Make&& make, const std::string& said) {
    try {
        (void)make();
        ADD_FAILURE() << "not refused: " << said;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_THAT(error.what(), HasSubstr(said));
    }
}

const std::vector<int64_t> milestones{3, 7, 7, 12};

TEST(LrCurve, PyTorchsFormulas) {
    expect_rates(constant_lr(0.25, 5), golden::constant);
    expect_rates(linear_lr(0.1, 0.9, 8), golden::linear);
    expect_rates(step_decay_lr(4, 0.5), golden::step_decay);
    expect_rates(multi_step_decay_lr(milestones, 0.5), golden::multi_step_decay);
    expect_rates(exponential_lr(0.9), golden::exponential);
    expect_rates(polynomial_lr(14, 1.5), golden::polynomial);
    expect_rates(cosine_lr(6, 0.01), golden::cosine);
    expect_rates(cosine_restarts_lr(5, 1, 0.01), golden::cosine_restarts);
    expect_rates(cosine_restarts_lr(2, 3, 0.01), golden::cosine_restarts_longer);
}

TEST(LrCurve, FormulasOfPapers) {
    expect_rates(inverse_sqrt_lr(4), golden::inverse_sqrt);
    expect_rates(wsd_lr({3, 5, 6, LrDecay::linear, 0.1}), golden::wsd_linear);
    expect_rates(wsd_lr({3, 5, 6, LrDecay::cosine, 0.1}), golden::wsd_cosine);
    expect_rates(wsd_lr({0, 8, 6, LrDecay::sqrt, 0}), golden::wsd_sqrt);
}

TEST(LrCurve, DeepSpeedsWarmups) {
    WarmupLrOptions plain;
    plain.warmup_min_lr = 0.1;
    plain.warmup_num_steps = 12;
    expect_rates(warmup_lr(plain), golden::warmup_log);
    expect_rates(warmup_lr({0, 0.3, 12, LrWarmup::linear, 0}), golden::warmup_linear);
    expect_rates(warmup_lr({0, std::nullopt, 1, LrWarmup::log, 0}), golden::warmup_of_one);
    expect_rates(warmup_lr({0.01, 0.3, 4, LrWarmup::log, 12}), golden::warmup_decay);
    expect_rates(warmup_lr({0, std::nullopt, 6, LrWarmup::linear, 6}), golden::warmup_decay_at_the_end);
    expect_rates(warmup_cosine_lr({12, 0.1, 4, 1e-4, LrWarmup::log}), golden::warmup_cosine);
    expect_rates(warmup_cosine_lr({12, 0, 3, 0.2, LrWarmup::linear}), golden::warmup_cosine_linear);
}

TEST(LrCurve, DeepSpeedsRangeTestAndOneCycle) {
    expect_rates(lr_range_test(0.01, 4, 2, false), golden::range_test);
    expect_rates(lr_range_test(0.01, 4, 2, true), golden::range_test_staircase);
    OneCycleLrOptions options{.cycle_min_lr = 0.01, .cycle_max_lr = 0.1, .cycle_first_step_size = 5};
    expect_rates(one_cycle_lr(options), golden::one_cycle);
    expect_momenta(one_cycle_lr(options), golden::one_cycle_momentum);
    options.cycle_momentum = false;
    EXPECT_EQ(momentum_at(*one_cycle_lr(options), 3), std::nullopt);
    const OneCycleLrOptions stairs{0.01, 0.1, 0, 8, 6, 4, 3};
    expect_rates(one_cycle_lr(stairs), golden::one_cycle_stairs);
    const OneCycleLrOptions decaying{0.01, 0.1, 0.5, 4, 8, 0, {}, 2, true, 0.7, 0.8, 0.01};
    expect_rates(one_cycle_lr(decaying), golden::one_cycle_decay);
    expect_momenta(one_cycle_lr(decaying), golden::one_cycle_decay_momentum);
}

TEST(LrCurve, OneAfterTheOtherAndSeveralAtOnce) {
    const LrCurvePtr warmup = linear_lr(0.5, 1, 5);
    const std::vector<int64_t> begins{5, 11};
    const LrCurvePtr sequence = sequential_lr({warmup, step_decay_lr(2, 0.5), cosine_lr(6, 0)}, begins);
    expect_rates(sequence, golden::sequential);
    expect_rates(chained_lr({constant_lr(0.25, 5), exponential_lr(0.9)}), golden::chained);
    expect_rates(chained_lr({sequential_lr({chained_lr({sequence})}, {})}), golden::sequential);
    EXPECT_EQ(sequence->text,
              "sequential([linear(start_factor=0.5, end_factor=1, total_steps=5), step_decay(step_size=2, gamma=0.5), "
              "cosine(total_steps=6, min_lr=0)], milestones=[5, 11])");
}

TEST(LrCurve, MomentumComesFromThePartThatHasIt) {
    const LrCurvePtr cycle = one_cycle_lr({.cycle_min_lr = 0.01, .cycle_max_lr = 0.1, .cycle_first_step_size = 4});
    const std::vector<int64_t> begin{2};
    const LrCurvePtr later = sequential_lr({exponential_lr(0.9), cycle}, begin);
    EXPECT_EQ(momentum_at(*later, 1), std::nullopt);
    EXPECT_EQ(momentum_at(*later, 2), 0.9);
    const LrCurvePtr halved = chained_lr({cycle, constant_lr(0.5, 100)});
    EXPECT_EQ(momentum_at(*halved, 4), 0.8);
    EXPECT_DOUBLE_EQ(lr_at(*halved, 4, 1), 0.05);
    EXPECT_EQ(momentum_at(*exponential_lr(0.9), 0), std::nullopt);
    expect_refused([&] { return chained_lr({constant_lr(0.5, 100), cycle}); },
                   "schedule 1 of the chain, one_cycle(cycle_min_lr=0.01");
    expect_refused([&] { return chained_lr({constant_lr(0.5, 100), later}); }, "put it first");
}

TEST(LrCurve, FarStepsAreComputedAlone) {
    for (const LrCurvePtr& curve :
         {cosine_lr(most, 0.01), cosine_restarts_lr(1, 2, 0.01), cosine_restarts_lr(most, most, 0.01),
          cosine_restarts_lr(3, most, 0), step_decay_lr(most, 0.5), inverse_sqrt_lr(most), linear_lr(0, 1, most),
          wsd_lr({most, 0, most, LrDecay::linear, 0}), warmup_lr({0, {}, most, LrWarmup::log, most}),
          warmup_cosine_lr({most, 0, 1, 0, LrWarmup::linear}), lr_range_test(0.1, 1, 1, true),
          one_cycle_lr({.cycle_min_lr = 0.1, .cycle_max_lr = 1, .cycle_first_step_size = most / 2})}) {
        for (const int64_t step : {most, most - 1, most / 2}) {
            EXPECT_GE(lr_at(*curve, step, 0.4), 0) << curve->text << " at " << step;
        }
    }
    EXPECT_DOUBLE_EQ(lr_at(*cosine_lr(10, 0.01), most - most % 20, 0.4), 0.4) << "an even number of halves";
    EXPECT_EQ(lr_at(*exponential_lr(0.9), most, 0.4), 0);
    EXPECT_DOUBLE_EQ(lr_at(*cosine_restarts_lr(1, 2, 0.01), most, 0.4), 0.4) << "2^63 - 1 steps are 63 cycles";
    EXPECT_NEAR(lr_at(*cosine_restarts_lr(3, most, 0), most, 0.4), 0.3, 1e-15) << "a third of the second cycle";
}

TEST(LrCurve, RatesThatAreNotFiniteAreRefused) {
    const LrCurvePtr curve = exponential_lr(10);
    EXPECT_DOUBLE_EQ(lr_at(*curve, 2, 1), 100);
    expect_refused([&] { return lr_at(*curve, 400, 1); }, "the learning rate of exponential(gamma=10) would be inf");
    expect_refused([&] { return lr_at(*curve, -1, 1); }, "the step is -1; it must be at least 0");
    expect_refused([&] { return lr_at(*curve, 1, -1); }, "base_lr is -1");
    expect_refused([&] { return lr_at(*curve, 1, nan); }, "base_lr is nan");
    expect_refused([&] { return momentum_at(*curve, -1); }, "the step is -1");
    OneCycleLrOptions growing{.cycle_min_lr = 0.1, .cycle_max_lr = 1, .cycle_first_step_size = 5};
    growing.decay_step_size = 10;
    growing.decay_mom_rate = 0.1;
    EXPECT_DOUBLE_EQ(*momentum_at(*one_cycle_lr(growing), 20), 0.99);
    expect_refused([&] { return momentum_at(*one_cycle_lr(growing), 30); }, "would be 1.08");
}

TEST(LrCurve, BadOptionsAreRefused) {
    expect_refused([] { return constant_lr(-0.1, 1); }, "factor is -0.1");
    expect_refused([] { return constant_lr(infinite, 1); }, "factor is inf");
    expect_refused([] { return constant_lr(0.1, 0); }, "total_steps is 0; it must be at least 1");
    expect_refused([] { return linear_lr(nan, 1, 1); }, "start_factor is nan");
    expect_refused([] { return linear_lr(1, -1, 1); }, "end_factor is -1");
    expect_refused([] { return linear_lr(1, 1, -5); }, "total_steps is -5");
    expect_refused([] { return step_decay_lr(0, 0.5); }, "step_size is 0");
    expect_refused([] { return step_decay_lr(1, nan); }, "gamma is nan");
    expect_refused([] { return exponential_lr(-1); }, "gamma is -1");
    expect_refused([] { return polynomial_lr(0, 1); }, "total_steps is 0");
    expect_refused([] { return polynomial_lr(1, infinite); }, "power is inf");
    expect_refused([] { return cosine_lr(0, 0); }, "total_steps is 0");
    expect_refused([] { return cosine_lr(1, -0.1); }, "min_lr is -0.1");
    expect_refused([] { return cosine_restarts_lr(0, 1, 0); }, "first_steps is 0");
    expect_refused([] { return cosine_restarts_lr(1, 0, 0); }, "multiplier is 0");
    expect_refused([] { return inverse_sqrt_lr(0); }, "warmup_steps is 0");
    expect_refused([] { return wsd_lr({-1, 0, 1, LrDecay::linear, 0}); }, "warmup_steps is -1");
    expect_refused([] { return wsd_lr({0, -1, 1, LrDecay::linear, 0}); }, "stable_steps is -1");
    expect_refused([] { return wsd_lr({0, 0, 0, LrDecay::linear, 0}); }, "decay_steps is 0");
    expect_refused([] { return wsd_lr({most, 1, 1, LrDecay::linear, 0}); }, "have no sum");
    expect_refused([] { return wsd_lr({0, 0, 1, LrDecay::linear, nan}); }, "min_ratio is nan");
    expect_refused([] { return warmup_lr({nan, {}, 1, LrWarmup::log, 0}); }, "warmup_min_lr is nan");
    expect_refused([] { return warmup_lr({0, -2, 1, LrWarmup::log, 0}); }, "warmup_max_lr is -2");
    expect_refused([] { return warmup_lr({0, {}, 0, LrWarmup::log, 0}); }, "warmup_num_steps is 0");
    expect_refused([] { return warmup_lr({0, {}, 1, LrWarmup::log, -1}); }, "total_num_steps is -1");
    expect_refused([] { return warmup_lr({0, {}, 10, LrWarmup::log, 9}); },
                   "total_num_steps is 9; it must be at least warmup_num_steps, which is 10");
    expect_refused([] { return warmup_cosine_lr({0, 0, 0, 0, LrWarmup::log}); },
                   "give the step at which the cosine ends");
    expect_refused([] { return warmup_cosine_lr({5, 0, 6, 0, LrWarmup::log}); }, "which is 6");
    expect_refused([] { return warmup_cosine_lr({5, -1, 5, 0, LrWarmup::log}); }, "warmup_min_ratio is -1");
    expect_refused([] { return warmup_cosine_lr({5, 0, 5, nan, LrWarmup::log}); }, "cos_min_ratio is nan");
    expect_refused([] { return lr_range_test(-1, 1, 1, false); }, "min_lr is -1");
    expect_refused([] { return lr_range_test(1, 0, 1, false); }, "step_size is 0");
    expect_refused([] { return lr_range_test(1, 1, infinite, false); }, "step_rate is inf");
}

TEST(LrCurve, BadOptionsOfOneCycleAreRefused) {
    const OneCycleLrOptions good{.cycle_min_lr = 0.1, .cycle_max_lr = 1};
    const auto refused = [&](auto field, auto value, const char* said) {
        OneCycleLrOptions options = good;
        options.*field = value;
        expect_refused([&] { return one_cycle_lr(options); }, said);
    };
    EXPECT_NO_THROW((void)one_cycle_lr(good));
    refused(&OneCycleLrOptions::cycle_max_lr, 0.0, "cycle_max_lr is not given; give the rate between the two halves");
    refused(&OneCycleLrOptions::cycle_max_lr, 0.05, "at least cycle_min_lr");
    refused(&OneCycleLrOptions::cycle_min_lr, nan, "cycle_min_lr is nan");
    refused(&OneCycleLrOptions::decay_lr_rate, -1.0, "decay_lr_rate is -1");
    refused(&OneCycleLrOptions::decay_mom_rate, infinite, "decay_mom_rate is inf");
    refused(&OneCycleLrOptions::cycle_first_step_size, 0, "cycle_first_step_size is 0");
    refused(&OneCycleLrOptions::cycle_second_step_size, 0, "cycle_second_step_size is 0");
    refused(&OneCycleLrOptions::cycle_first_stair_count, -1, "cycle_first_stair_count is -1");
    refused(&OneCycleLrOptions::cycle_second_stair_count, -1, "cycle_second_stair_count is -1");
    refused(&OneCycleLrOptions::cycle_second_step_size, most, "have no sum");
    refused(&OneCycleLrOptions::decay_step_size, -1, "decay_step_size is -1");
    refused(&OneCycleLrOptions::cycle_min_mom, 0.0, "cycle_min_mom is 0");
    refused(&OneCycleLrOptions::cycle_max_mom, 1.0, "cycle_max_mom is 1");
    refused(&OneCycleLrOptions::cycle_max_mom, 0.5, "at least cycle_min_mom");
}

TEST(LrCurve, BadCompositionsAreRefused) {
    const LrCurvePtr curve = exponential_lr(0.9);
    const auto steps = [](auto... values) { return std::vector<int64_t>{values...}; };
    expect_refused([&] { return multi_step_decay_lr(steps(), 1); }, "the number of milestones is 0");
    expect_refused([&] { return multi_step_decay_lr(steps(5, 4), 1); }, "milestone 1 is 4");
    expect_refused([&] { return multi_step_decay_lr(steps(0), 1); }, "milestone 0 is 0");
    expect_refused([&] { return multi_step_decay_lr(std::vector<int64_t>(1001, 1), 1); }, "at most 1000");
    expect_refused([&] { return sequential_lr({}, steps()); }, "the number of schedules is 0");
    expect_refused([&] { return sequential_lr({curve}, steps(1)); }, "1 milestones do not separate 1 schedules");
    expect_refused([&] { return sequential_lr({curve, curve}, steps()); }, "0 milestones do not separate 2");
    expect_refused([&] { return sequential_lr({curve, curve, curve}, steps(3, 3)); }, "strictly ascending");
    expect_refused([&] { return sequential_lr({curve, curve}, steps(0)); }, "milestone 0 is 0");
    expect_refused([&] { return chained_lr({}); }, "the number of schedules is 0");
    expect_refused([&] { return chained_lr(std::vector<LrCurvePtr>(1001, curve)); }, "more than 1000");
    EXPECT_NO_THROW((void)chained_lr(std::vector<LrCurvePtr>(1000, curve)));
    const LrCurvePtr inner = chained_lr(std::vector<LrCurvePtr>(500, curve));  // counts as 501 in another
    EXPECT_NO_THROW((void)chained_lr({inner, chained_lr(std::vector<LrCurvePtr>(498, curve))}));
    expect_refused([&] { return chained_lr({inner, chained_lr(std::vector<LrCurvePtr>(499, curve))}); }, "more than");
}

TEST(LrCurve, NestingIsBounded) {
    LrCurvePtr deep = exponential_lr(1);
    for (int depth = 2; depth <= 16; ++depth) deep = chained_lr({deep});
    EXPECT_EQ(lr_at(*deep, 5, 0.4), 0.4);
    expect_refused([&] { return sequential_lr({deep}, {}); }, "nested 17 deep; at most 16");
    LrCurvePtr wide = exponential_lr(1);  // each has twice as many as the one before
    const auto doubled = [&] {
        for (int i = 0; i < 12; ++i) wide = chained_lr({wide, wide});
        return wide;
    };
    expect_refused(doubled, "more than 1000 schedules");
}

}  // namespace
}  // namespace tsr
