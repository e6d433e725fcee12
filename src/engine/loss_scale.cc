#include "engine/loss_scale.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "base/refuse.hpp"

namespace tsr {

namespace {

// A damaged checkpoint may have it; it then stays, and last_overflow is before it.
constexpr int64_t last_iteration = std::numeric_limits<int64_t>::max();

}  // namespace

LossScale::LossScale(const LossScaleOptions& options) : options_(options) {
    const bool fits = options.fixed == 0 || is_normal_f32(options.fixed);
    refuse_unless(fits, "loss_scale", options.fixed, "0 (dynamic) or a positive normal f32 number");
    refuse_unless(is_normal_f32(options.minimum), "min_loss_scale", options.minimum, "a positive normal f32 number");
    refuse_unless(is_normal_f32(options.initial), "the initial scale", options.initial, "a positive normal f32 number");
    refuse_unless(!is_dynamic() || options.minimum <= options.initial, "min_loss_scale", options.minimum,
                  "at most the initial scale");
    refuse_unless(options.window >= 1, "loss_scale_window", options.window, "at least 1");
    refuse_unless(options.hysteresis >= 1, "hysteresis", options.hysteresis, "at least 1");
    state_.scale = is_dynamic() ? options.initial : options.fixed;
    state_.hysteresis = options.hysteresis;
}

void LossScale::shrink() {
    if (state_.hysteresis > 1) {
        --state_.hysteresis;
        return;
    }
    if (state_.scale <= options_.minimum) {
        throw Error(
            Code::invalid_state,
            fmt::format("the gradients overflow although the loss scale is at its minimum {}; lower the learning "
                        "rate, look for a fault in the model, lower fp16.min_loss_scale, or train with bf16",
                        options_.minimum));
    }
    state_.scale = std::max(state_.scale / 2, options_.minimum);
}

void LossScale::update(bool overflow) {
    if (!is_dynamic()) return;
    if (overflow) {
        shrink();
        state_.last_overflow = std::min(state_.iteration, last_iteration - 1);
    } else {
        if (options_.restores_every_step) state_.hysteresis = options_.hysteresis;
        const int64_t stable = state_.iteration - 1 - state_.last_overflow;
        if (stable > 0 && stable % options_.window == 0) {
            state_.hysteresis = options_.hysteresis;
            if (is_normal_f32(state_.scale * 2)) state_.scale *= 2;
        }
    }
    if (state_.iteration < last_iteration) ++state_.iteration;
}

void LossScale::restore(const State& state) {
    refuse_unless(is_normal_f32(state.scale), "the saved loss scale", state.scale, "a positive normal f32 number");
    refuse_unless(state.iteration >= 0, "the saved iteration", static_cast<double>(state.iteration), "at least 0");
    refuse_unless(state.last_overflow >= -1 && state.last_overflow < state.iteration,
                  "the saved iteration of the last overflow", static_cast<double>(state.last_overflow),
                  "at least -1 and before the saved iteration");
    refuse_unless(state.hysteresis >= 1, "the saved hysteresis", static_cast<double>(state.hysteresis), "at least 1");
    state_ = state;
    if (!is_dynamic()) state_.scale = options_.fixed;
}

}  // namespace tsr
