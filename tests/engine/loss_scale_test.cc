// The loss scale, step by step, by DeepSpeed's rules.
#include "engine/loss_scale.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace tsr {
namespace {

// The scale after each step; in `steps`, '.' is a step without overflow, 'X' one with.
std::vector<double> scales(LossScale& scale, const std::string& steps) {
    std::vector<double> after;
    for (const char step : steps) {
        scale.update(step == 'X');
        after.push_back(scale.scale());
    }
    return after;
}

using Scales = std::vector<double>;

TEST(LossScale, DoublesAfterEachWindowWithoutOverflow) {
    LossScale scale({.initial = 16, .window = 2});
    EXPECT_EQ(scales(scale, "......."), (Scales{16, 16, 32, 32, 64, 64, 128}));
}

TEST(LossScale, HalvesWhenTheHysteresisIsUsedUpWhichAGrowthRestores) {
    LossScale scale({.initial = 16, .window = 2, .hysteresis = 2});
    EXPECT_EQ(scales(scale, "...XX.X"), (Scales{16, 16, 32, 32, 16, 16, 8}));
    EXPECT_EQ(scales(scale, "...XX"), (Scales{8, 8, 16, 16, 8}));
}

TEST(LossScale, ConsecutiveHysteresisIsRestoredByEachStepWithoutOverflow) {
    LossScale scale({.initial = 16, .window = 100, .hysteresis = 2, .restores_every_step = true});
    EXPECT_EQ(scales(scale, "X.X.XXX"), (Scales{16, 16, 16, 16, 16, 8, 4}));
}

TEST(LossScale, AHysteresisOfOneHalvesAtOnce) {
    LossScale scale({.initial = 16, .hysteresis = 1});
    EXPECT_EQ(scales(scale, "XX."), (Scales{8, 4, 4}));
}

TEST(LossScale, AWindowBeginsAfterAnOverflow) {
    LossScale scale({.initial = 16, .window = 3, .hysteresis = 1});
    EXPECT_EQ(scales(scale, "..X.....X."), (Scales{16, 16, 8, 8, 8, 8, 16, 16, 8, 8}));
}

TEST(LossScale, IsAnErrorAtItsMinimumAndChangesNothing) {
    LossScale scale({.initial = 4, .hysteresis = 1, .minimum = 3});
    EXPECT_EQ(scales(scale, "X"), (Scales{3}));
    const LossScale::State before = scale.state();
    try {
        scale.update(true);
        FAIL() << "the scale is at its minimum";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_state);
        EXPECT_NE(std::string(error.what()).find("the loss scale is at its minimum 3"), std::string::npos)
            << error.what();
    }
    EXPECT_EQ(scale.state().iteration, before.iteration);
    EXPECT_EQ(scale.state().last_overflow, before.last_overflow);
    EXPECT_EQ(scales(scale, "."), (Scales{3}));
}

TEST(LossScale, AFixedOneNeverChanges) {
    LossScale scale({.fixed = 128, .window = 1, .hysteresis = 1});
    EXPECT_FALSE(scale.is_dynamic());
    EXPECT_EQ(scales(scale, "XXX...."), (Scales(7, 128)));
}

TEST(LossScale, DoesNotGrowBeyondF32) {
    LossScale scale({.initial = 0x1p126, .window = 1});
    EXPECT_EQ(scales(scale, "...."), (Scales{0x1p126, 0x1p127, 0x1p127, 0x1p127}));
}

TEST(LossScale, ARestoredStateContinues) {
    const LossScaleOptions options{.initial = 16, .window = 2, .hysteresis = 2};
    LossScale first(options);
    (void)scales(first, "...X.");
    LossScale second(options);
    second.restore(first.state());
    EXPECT_EQ(scales(second, "X..."), scales(first, "X..."));
}

TEST(LossScale, ADamagedCountOfStepsDoesNotOverflow) {
    constexpr int64_t last = std::numeric_limits<int64_t>::max();
    for (const int64_t overflow : {int64_t{-1}, last - 1}) {
        LossScale scale({.initial = 16});
        scale.restore({16, last, overflow, 1});
        scale.update(false);
        scale.restore(scale.state());
        EXPECT_EQ(scale.state().iteration, last);
        EXPECT_EQ(scales(scale, "XX"), (Scales{8, 4}));
        scale.restore(scale.state());
        EXPECT_EQ(scale.state().last_overflow, last - 1);
    }
}

TEST(LossScale, OptionsAndStatesOutOfRangeAreRefused) {
    EXPECT_THROW(LossScale({.fixed = -1}), Error);
    EXPECT_THROW(LossScale({.fixed = 1e300}), Error);
    EXPECT_THROW(LossScale({.initial = 0}), Error);
    EXPECT_THROW(LossScale({.window = 0}), Error);
    EXPECT_THROW(LossScale({.hysteresis = 0}), Error);
    EXPECT_THROW(LossScale({.minimum = 0}), Error);
    EXPECT_THROW(LossScale({.initial = 4, .minimum = 8}), Error);
    EXPECT_EQ(LossScale({.fixed = 2, .initial = 4, .minimum = 8}).scale(), 2) << "it never shrinks";
    LossScale scale({.initial = 16});
    for (const LossScale::State& state :
         {LossScale::State{0, 0, -1, 1}, LossScale::State{8, -1, -1, 1}, LossScale::State{8, 3, 3, 1},
          LossScale::State{8, 3, -2, 1}, LossScale::State{8, 3, 1, 0}}) {
        EXPECT_THROW(scale.restore(state), Error);
        EXPECT_EQ(scale.scale(), 16);
    }
}

}  // namespace
}  // namespace tsr
