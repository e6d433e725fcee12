// The scale of the loss that keeps small f16 gradients from underflowing, by DeepSpeed's rules: fixed, or dynamic. A
// dynamic scale halves after `hysteresis` overflows and doubles after `window` steps without one. If it must halve at its
// minimum, update() throws, as DeepSpeed does with ZeRO. Owned by one thread; the same on all ranks.
#pragma once

#include <cfloat>
#include <cstdint>

namespace tsr {

// What gradients may be scaled by, which are usually f32.
[[nodiscard]] constexpr bool is_normal_f32(double value) { return value >= FLT_MIN && value <= FLT_MAX; }

struct LossScaleOptions {
    double fixed = 0;  // 0: dynamic
    double initial = 65536;
    int64_t window = 1000;
    int64_t hysteresis = 2;            // overflows until the scale halves
    bool restores_every_step = false;  // a step without overflow restores the hysteresis; false: a growth does
    double minimum = 1;
};

class LossScale {
   public:
    // Throws INVALID_ARGUMENT for options out of range.
    explicit LossScale(const LossScaleOptions& options);

    [[nodiscard]] double scale() const { return state_.scale; }
    [[nodiscard]] bool is_dynamic() const { return options_.fixed == 0; }
    // Ends a step. Throws INVALID_STATE, and changes nothing, if the scale must halve at its minimum.
    void update(bool overflow);

    // What a checkpoint keeps.
    struct State {
        double scale = 1;
        int64_t iteration = 0;
        int64_t last_overflow = -1;
        int64_t hysteresis = 1;  // overflows left until the scale halves
    };
    [[nodiscard]] const State& state() const { return state_; }
    // Throws INVALID_ARGUMENT for values out of range, and changes nothing.
    void restore(const State& state);

   private:
    void shrink();

    LossScaleOptions options_;
    State state_;
};

}  // namespace tsr
