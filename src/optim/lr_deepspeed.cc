// The schedules of DeepSpeed. Its formulas count iterations from -1, so `step - 1` is its iteration.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "optim/lr_checks.hpp"
#include "optim/lr_curve.hpp"

namespace tsr {

namespace {

const char* name_of(LrWarmup type) { return type == LrWarmup::log ? "log" : "linear"; }

void check_warmup(int64_t warmup, int64_t total) {
    check_steps("warmup_num_steps", warmup);
    if (total >= warmup) return;
    throw Error(Code::invalid_argument,
                fmt::format("total_num_steps is {}; it must be at least warmup_num_steps, which is {}", total, warmup));
}

// DeepSpeed's warm-up has at least 2 steps, since it divides by their logarithm.
int64_t warmup_of(int64_t steps) { return std::max<int64_t>(2, steps); }

// From 0 to 1 while `iteration` goes from 0 to `warmup`.
double warm(int64_t iteration, int64_t warmup, LrWarmup type) {
    const auto i = static_cast<double>(iteration);
    const auto n = static_cast<double>(warmup);
    return type == LrWarmup::log ? std::log(i + 1) / std::log(n) : i / n;
}

double between(double low, double high, double share) { return low + (high - low) * share; }

// The number of steps that a decay takes, of which it needs at least 1.
double length(int64_t from, int64_t to) { return static_cast<double>(std::max<int64_t>(1, to - from)); }

}  // namespace

LrCurvePtr warmup_lr(const WarmupLrOptions& o) {
    check_not_negative("warmup_min_lr", o.warmup_min_lr);
    if (o.warmup_max_lr) check_not_negative("warmup_max_lr", *o.warmup_max_lr);
    refuse_unless(o.total_num_steps >= 0, "total_num_steps", o.total_num_steps, "at least 0");
    check_warmup(o.warmup_num_steps, o.total_num_steps == 0 ? o.warmup_num_steps : o.total_num_steps);
    LrCurve curve;
    curve.scales_base = !o.warmup_max_lr;
    curve.text = fmt::format(
        "warmup(warmup_min_lr={}, warmup_max_lr={}, warmup_num_steps={}, warmup_type={}, total_num_steps={})",
        o.warmup_min_lr, o.warmup_max_lr ? fmt::format("{}", *o.warmup_max_lr) : "base", o.warmup_num_steps,
        name_of(o.warmup_type), o.total_num_steps);
    curve.lr = [o](int64_t step, double base) {
        if (step == 0) return o.warmup_min_lr;
        const int64_t i = step - 1;
        const int64_t n = warmup_of(o.warmup_num_steps);
        double share = 1;
        if (i < n) {
            share = warm(i, n, o.warmup_type);
        } else if (o.total_num_steps > 0) {
            share = std::max(0.0, static_cast<double>(o.total_num_steps - i) / length(n, o.total_num_steps));
        }
        return between(o.warmup_min_lr, o.warmup_max_lr.value_or(base), share);
    };
    return std::make_shared<const LrCurve>(std::move(curve));
}

LrCurvePtr warmup_cosine_lr(const WarmupCosineLrOptions& o) {
    if (o.total_num_steps == 0) refuse("total_num_steps is not given; give the step at which the cosine ends");
    check_steps("total_num_steps", o.total_num_steps);
    check_not_negative("warmup_min_ratio", o.warmup_min_ratio);
    check_not_negative("cos_min_ratio", o.cos_min_ratio);
    check_warmup(o.warmup_num_steps, o.total_num_steps);
    LrCurve curve;
    curve.text = fmt::format(
        "warmup_cosine(total_num_steps={}, warmup_min_ratio={}, warmup_num_steps={}, cos_min_ratio={}, warmup_type={})",
        o.total_num_steps, o.warmup_min_ratio, o.warmup_num_steps, o.cos_min_ratio, name_of(o.warmup_type));
    curve.lr = [o](int64_t step, double base) {
        if (step == 0) return 0.0;
        const int64_t i = step - 1;
        const int64_t n = warmup_of(o.warmup_num_steps);
        if (i < n) return base * between(o.warmup_min_ratio, 1, warm(i, n, o.warmup_type));
        const double done = std::min(1.0, static_cast<double>(i - n + 1) / length(n, o.total_num_steps));
        const double share = (1 + std::cos(std::numbers::pi * done)) / 2;
        return base * std::max(0.0, between(o.cos_min_ratio, 1, share));
    };
    return std::make_shared<const LrCurve>(std::move(curve));
}

namespace {

// The two legs of the cycle and what comes after them.
struct Cycle {
    struct Leg {
        int64_t steps;
        int64_t stairs;  // 0: none

        // From 0 to 1 while `step` goes from 0 to `steps`.
        [[nodiscard]] double height(int64_t step) const {
            if (stairs == 0) return static_cast<double>(step) / static_cast<double>(steps);
            const auto count = static_cast<double>(stairs);
            return std::floor(static_cast<double>(step) * count / static_cast<double>(steps)) / count;
        }
    };
    Leg up;
    Leg down;
    int64_t decay_step_size;

    explicit Cycle(const OneCycleLrOptions& o)
        : up{o.cycle_first_step_size, o.cycle_first_stair_count},
          down{o.cycle_second_step_size.value_or(up.steps), o.cycle_second_stair_count.value_or(up.stairs)},
          decay_step_size(o.decay_step_size) {}

    [[nodiscard]] bool is_over(int64_t step) const { return step > up.steps + down.steps; }
    [[nodiscard]] double height(int64_t step) const {
        return step <= up.steps ? up.height(step) : down.height(up.steps + down.steps - step);
    }
    [[nodiscard]] double decay(int64_t step, double rate) const {
        if (decay_step_size == 0) return 1;
        return 1 + rate * (static_cast<double>(step - up.steps - down.steps) / static_cast<double>(decay_step_size));
    }
};

void check(const OneCycleLrOptions& o) {
    check_not_negative("cycle_min_lr", o.cycle_min_lr);
    check_not_negative("cycle_max_lr", o.cycle_max_lr);
    if (o.cycle_max_lr == 0) refuse("cycle_max_lr is not given; give the rate between the two halves of the cycle");
    refuse_unless(o.cycle_max_lr >= o.cycle_min_lr, "cycle_max_lr", o.cycle_max_lr, "at least cycle_min_lr");
    check_not_negative("decay_lr_rate", o.decay_lr_rate);
    check_not_negative("decay_mom_rate", o.decay_mom_rate);
    const Cycle cycle(o);
    check_steps("cycle_first_step_size", cycle.up.steps);
    check_steps("cycle_second_step_size", cycle.down.steps);
    for (const auto& [name, count] : {std::pair{"cycle_first_stair_count", cycle.up.stairs},
                                      std::pair{"cycle_second_stair_count", cycle.down.stairs},
                                      std::pair{"decay_step_size", cycle.decay_step_size}}) {
        refuse_unless(count >= 0, name, count, "at least 0");
    }
    if (cycle.up.steps > std::numeric_limits<int64_t>::max() - cycle.down.steps) {
        throw Error(Code::invalid_argument,
                    fmt::format("cycle_first_step_size {} and cycle_second_step_size {} have no sum", cycle.up.steps,
                                cycle.down.steps));
    }
    if (!o.cycle_momentum) return;
    refuse_unless(o.cycle_min_mom > 0 && o.cycle_min_mom < 1, "cycle_min_mom", o.cycle_min_mom, "above 0 and below 1");
    refuse_unless(o.cycle_max_mom >= o.cycle_min_mom && o.cycle_max_mom < 1, "cycle_max_mom", o.cycle_max_mom,
                  "at least cycle_min_mom and below 1");
}

}  // namespace

LrCurvePtr one_cycle_lr(const OneCycleLrOptions& o) {
    check(o);
    const Cycle cycle(o);
    LrCurve curve;
    curve.scales_base = false;
    curve.text = fmt::format(
        "one_cycle(cycle_min_lr={}, cycle_max_lr={}, decay_lr_rate={}, cycle_first_step_size={}, "
        "cycle_second_step_size={}, cycle_first_stair_count={}, cycle_second_stair_count={}, decay_step_size={}, "
        "cycle_momentum={}, cycle_min_mom={}, cycle_max_mom={}, decay_mom_rate={})",
        o.cycle_min_lr, o.cycle_max_lr, o.decay_lr_rate, cycle.up.steps, cycle.down.steps, cycle.up.stairs,
        cycle.down.stairs, o.decay_step_size, o.cycle_momentum, o.cycle_min_mom, o.cycle_max_mom, o.decay_mom_rate);
    curve.lr = [o, cycle](int64_t step, double) {
        if (cycle.is_over(step)) return o.cycle_min_lr / cycle.decay(step, o.decay_lr_rate);
        return between(o.cycle_min_lr, o.cycle_max_lr, cycle.height(step));
    };
    if (o.cycle_momentum) {
        curve.momentum = [o, cycle](int64_t step) -> std::optional<double> {
            if (cycle.is_over(step)) return o.cycle_max_mom * cycle.decay(step, o.decay_mom_rate);
            return between(o.cycle_max_mom, o.cycle_min_mom, cycle.height(step));
        };
    }
    return std::make_shared<const LrCurve>(std::move(curve));
}

LrCurvePtr lr_range_test(double min_lr, int64_t step_size, double step_rate, bool staircase) {
    check_not_negative("min_lr", min_lr);
    check_steps("step_size", step_size);
    check_not_negative("step_rate", step_rate);
    LrCurve curve;
    curve.scales_base = false;
    curve.text = fmt::format("range_test(min_lr={}, step_size={}, step_rate={}, staircase={})", min_lr, step_size,
                             step_rate, staircase);
    curve.lr = [=](int64_t step, double) {
        const double x = staircase ? static_cast<double>(step / step_size)
                                   : static_cast<double>(step) / static_cast<double>(step_size);
        return min_lr * (1 + step_rate * x);
    };
    return std::make_shared<const LrCurve>(std::move(curve));
}

}  // namespace tsr
