// tessera/lr_schedule.h: learning-rate schedules.
#include "tessera/lr_schedule.h"

#include <cmath>
#include <limits>
#include <optional>

#include "handles.hpp"
#include "optim/lr_schedule.hpp"

namespace tsr::capi {

namespace {

constexpr tsr_lr_warmup_options default_warmup{sizeof(tsr_lr_warmup_options), 0, -1, 1000, TSR_LR_WARMUP_LOG, 0};
constexpr tsr_lr_warmup_cosine_options default_warmup_cosine{
    sizeof(tsr_lr_warmup_cosine_options), 0, 0, 1000, 1e-4, TSR_LR_WARMUP_LOG};
constexpr tsr_lr_one_cycle_options default_one_cycle{
    sizeof(tsr_lr_one_cycle_options), 0, 0, 0, 2000, -1, 0, -1, 0, 1, 0.8, 0.9, 0};

// Stores a handle for a schedule along the curve from `make`.
template <class Make>
tsr_status along(tsr_lr_schedule** out, Make&& make) {
    return guard([&] { create(out, [&] { return std::make_shared<LrSchedule>(make()); }); });
}

// An option of which -1 is the default.
template <class T>
std::optional<T> given(T value) {
    return value == T{-1} ? std::nullopt : std::optional(value);
}

// An enumeration of which `Last` is the last.
template <class Enum, Enum Last>
Enum choice(int32_t value, const char* what) {
    if (value >= 0 && value <= static_cast<int32_t>(Last)) return static_cast<Enum>(value);
    throw Error(Code::invalid_argument,
                fmt::format("{} is {}; it must be from 0 to {}", what, value, static_cast<int32_t>(Last)));
}

LrWarmup warmup_in(tsr_lr_warmup_type type) { return choice<LrWarmup, LrWarmup::linear>(type, "warmup_type"); }

template <class T>
std::span<const T> array_in(const T* values, size_t n, const char* what) {
    if (n > most_lr_parts) {  // before reading them
        throw Error(Code::invalid_argument,
                    fmt::format("there are {} {}; at most {} are allowed", n, what, most_lr_parts));
    }
    if (n > 0) required(values, what);
    return {values, n};
}

std::vector<LrCurvePtr> curves_in(const tsr_lr_schedule* const* schedules, size_t n) {
    std::vector<LrCurvePtr> curves;
    for (const tsr_lr_schedule* each : array_in(schedules, n, "schedules")) {
        curves.push_back(object_of(each, fmt::format("schedule {}", curves.size()).c_str())->curve());
    }
    return curves;
}

}  // namespace

extern "C" {

tsr_status tsr_lr_constant(double factor, int64_t total_steps, tsr_lr_schedule** out) {
    return along(out, [&] { return constant_lr(factor, total_steps); });
}

tsr_status tsr_lr_linear(double start_factor, double end_factor, int64_t total_steps, tsr_lr_schedule** out) {
    return along(out, [&] { return linear_lr(start_factor, end_factor, total_steps); });
}

tsr_status tsr_lr_step_decay(int64_t step_size, double gamma, tsr_lr_schedule** out) {
    return along(out, [&] { return step_decay_lr(step_size, gamma); });
}

tsr_status tsr_lr_multi_step_decay(const int64_t* milestones, size_t n, double gamma, tsr_lr_schedule** out) {
    return along(out, [&] { return multi_step_decay_lr(array_in(milestones, n, "milestones"), gamma); });
}

tsr_status tsr_lr_exponential(double gamma, tsr_lr_schedule** out) {
    return along(out, [&] { return exponential_lr(gamma); });
}

tsr_status tsr_lr_polynomial(int64_t total_steps, double power, tsr_lr_schedule** out) {
    return along(out, [&] { return polynomial_lr(total_steps, power); });
}

tsr_status tsr_lr_cosine(int64_t total_steps, double min_lr, tsr_lr_schedule** out) {
    return along(out, [&] { return cosine_lr(total_steps, min_lr); });
}

tsr_status tsr_lr_cosine_restarts(int64_t first_steps, int64_t multiplier, double min_lr, tsr_lr_schedule** out) {
    return along(out, [&] { return cosine_restarts_lr(first_steps, multiplier, min_lr); });
}

tsr_status tsr_lr_inverse_sqrt(int64_t warmup_steps, tsr_lr_schedule** out) {
    return along(out, [&] { return inverse_sqrt_lr(warmup_steps); });
}

tsr_status tsr_lr_wsd(int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps, tsr_lr_decay decay,
                      double min_ratio, tsr_lr_schedule** out) {
    return along(out, [&] {
        return wsd_lr(
            {warmup_steps, stable_steps, decay_steps, choice<LrDecay, LrDecay::sqrt>(decay, "decay"), min_ratio});
    });
}

tsr_status tsr_lr_warmup_options_init(tsr_lr_warmup_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_warmup, "options");
}

tsr_status tsr_lr_warmup(const tsr_lr_warmup_options* options, tsr_lr_schedule** out) {
    return along(out, [&] {
        const auto o = options_in(options, default_warmup, "options");
        return warmup_lr(
            {o.warmup_min_lr, given(o.warmup_max_lr), o.warmup_num_steps, warmup_in(o.warmup_type), o.total_num_steps});
    });
}

tsr_status tsr_lr_warmup_cosine_options_init(tsr_lr_warmup_cosine_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_warmup_cosine, "options");
}

tsr_status tsr_lr_warmup_cosine(const tsr_lr_warmup_cosine_options* options, tsr_lr_schedule** out) {
    return along(out, [&] {
        const auto o = options_in(options, default_warmup_cosine, "options");
        return warmup_cosine_lr(
            {o.total_num_steps, o.warmup_min_ratio, o.warmup_num_steps, o.cos_min_ratio, warmup_in(o.warmup_type)});
    });
}

tsr_status tsr_lr_one_cycle_options_init(tsr_lr_one_cycle_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_one_cycle, "options");
}

tsr_status tsr_lr_one_cycle(const tsr_lr_one_cycle_options* options, tsr_lr_schedule** out) {
    return along(out, [&] {
        const auto o = options_in(options, default_one_cycle, "options");
        return one_cycle_lr(
            {o.cycle_min_lr, o.cycle_max_lr, o.decay_lr_rate, o.cycle_first_step_size, given(o.cycle_second_step_size),
             o.cycle_first_stair_count, given(o.cycle_second_stair_count), o.decay_step_size,
             flag(o.cycle_momentum, "cycle_momentum"), o.cycle_min_mom, o.cycle_max_mom, o.decay_mom_rate});
    });
}

tsr_status tsr_lr_range_test(double min_lr, int64_t step_size, double step_rate, tsr_flag staircase,
                             tsr_lr_schedule** out) {
    return along(out, [&] { return lr_range_test(min_lr, step_size, step_rate, flag(staircase, "staircase")); });
}

tsr_status tsr_lr_sequential(const tsr_lr_schedule* const* schedules, size_t n, const int64_t* milestones,
                             size_t n_milestones, tsr_lr_schedule** out) {
    return along(
        out, [&] { return sequential_lr(curves_in(schedules, n), array_in(milestones, n_milestones, "milestones")); });
}

tsr_status tsr_lr_chained(const tsr_lr_schedule* const* schedules, size_t n, tsr_lr_schedule** out) {
    return along(out, [&] { return chained_lr(curves_in(schedules, n)); });
}

tsr_status tsr_lr_schedule_lr_at(const tsr_lr_schedule* schedule, int64_t step, double base_lr, double* lr) {
    return guard([&] { required(lr, "lr") = lr_at(*object_of(schedule, "schedule")->curve(), step, base_lr); });
}

tsr_status tsr_lr_schedule_momentum_at(const tsr_lr_schedule* schedule, int64_t step, double* momentum) {
    return guard([&] {
        required(momentum, "momentum") = momentum_at(*object_of(schedule, "schedule")->curve(), step)
                                             .value_or(std::numeric_limits<double>::quiet_NaN());
    });
}

tsr_status tsr_lr_schedule_attach(tsr_lr_schedule* schedule, tsr_optimizer* optimizer) {
    return guard([&] { object_of(schedule, "schedule")->attach(object_of(optimizer, "optimizer")); });
}

tsr_status tsr_lr_schedule_step(tsr_lr_schedule* schedule) {
    return guard([&] { object_of(schedule, "schedule")->step(); });
}

tsr_status tsr_lr_schedule_steps(const tsr_lr_schedule* schedule, int64_t* steps) {
    return guard([&] { required(steps, "steps") = object_of(schedule, "schedule")->steps(); });
}

tsr_status tsr_lr_schedule_set_steps(tsr_lr_schedule* schedule, int64_t steps) {
    return guard([&] { object_of(schedule, "schedule")->set_steps(steps); });
}

void tsr_lr_schedule_destroy(tsr_lr_schedule* schedule) { destroy(schedule); }

}  // extern "C"

}  // namespace tsr::capi
