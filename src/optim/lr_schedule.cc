#include "optim/lr_schedule.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.hpp"

namespace tsr {

void LrSchedule::attach(const std::shared_ptr<Optimizer>& optimizer) {
    for (const Driven& each : driven_) {
        if (each.optimizer.lock() != optimizer) continue;
        throw Error(Code::invalid_state,
                    fmt::format("this optimizer is attached already, with a base learning rate of {}; for another one, "
                                "attach it to a new schedule and set its steps",
                                each.base_lr));
    }
    const double base_lr = optimizer->lr();
    const double lr = lr_at(*curve_, steps_, base_lr);
    driven_.reserve(driven_.size() + 1);
    if (curve_->momentum) {
        optimizer->check_momentum();
        if (const auto momentum = momentum_at(*curve_, steps_)) optimizer->set_momentum(*momentum);
    }
    optimizer->set_lr(lr);
    driven_.push_back({optimizer, base_lr});
}

int64_t LrSchedule::next() const {
    if (steps_ < std::numeric_limits<int64_t>::max()) return steps_ + 1;
    throw Error(Code::invalid_state, fmt::format("the schedule is at step {}, the last one", steps_));
}

void LrSchedule::step() { set_steps(next()); }

void LrSchedule::check_step() const { check_steps(next()); }

void LrSchedule::check_steps(int64_t steps) const {
    if (const auto momentum = momentum_at(*curve_, steps)) Optimizer::check_momentum_value(*momentum);
    for (const Driven& each : driven_) check_not_negative("the scheduled lr", lr_at(*curve_, steps, each.base_lr));
}

void LrSchedule::set_steps(int64_t steps) {
    check_steps(steps);
    const std::optional<double> momentum = momentum_at(*curve_, steps);
    for (const Driven& each : driven_) {
        const std::shared_ptr<Optimizer> optimizer = each.optimizer.lock();
        if (!optimizer) continue;
        if (momentum) optimizer->set_momentum(*momentum);
        optimizer->set_lr(lr_at(*curve_, steps, each.base_lr));
    }
    steps_ = steps;
}

LrScheduleState LrSchedule::state() const {
    LrScheduleState state{curve_->text, steps_, {}};
    for (const Driven& each : driven_) state.base_lrs.push_back(each.base_lr);
    return state;
}

void LrSchedule::check_state(const LrScheduleState& saved) const {
    if (saved.text != curve_->text) {
        throw Error(
            Code::mismatch,
            fmt::format("the saved position belongs to the schedule {}, but this one is {}; create "
                        "the saved one; to continue with this one, load the rest (the load's `only`) and set the "
                        "schedule's steps",
                        saved.text, curve_->text));
    }
    if (saved.base_lrs.size() != driven_.size()) {
        throw Error(Code::mismatch,
                    fmt::format("the saved schedule has {} optimizers, but this one has {}; attach the same "
                                "optimizers before the load",
                                saved.base_lrs.size(), driven_.size()));
    }
    const auto is_rate = [](double lr) { return std::isfinite(lr) && lr >= 0; };
    if (saved.steps < 0 || !std::ranges::all_of(saved.base_lrs, is_rate)) {
        throw Error(Code::mismatch, fmt::format("the saved schedule is at step {}, or has a base learning rate that is "
                                                "negative or not finite",
                                                saved.steps));
    }
    for (const double base_lr : saved.base_lrs) (void)lr_at(*curve_, saved.steps, base_lr);
}

void LrSchedule::load_state(const LrScheduleState& saved) {
    check_state(saved);
    for (size_t i = 0; i < driven_.size(); ++i) driven_[i].base_lr = saved.base_lrs[i];
    set_steps(saved.steps);
}

}  // namespace tsr
