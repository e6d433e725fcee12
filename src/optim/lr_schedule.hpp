// A learning-rate schedule: a curve, the step at which it is, and the optimizers that it sets. It does not keep them: one
// that no longer exists is left out. Owned by the thread that owns them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optim/lr_curve.hpp"
#include "optim/optimizer.hpp"

namespace tsr {

// The state saved in a checkpoint. `text` identifies the curve.
struct LrScheduleState {
    std::string text;
    int64_t steps = 0;
    std::vector<double> base_lrs;  // of the optimizers in the order in which they were attached
};

class LrSchedule {
   public:
    explicit LrSchedule(LrCurvePtr curve) : curve_(std::move(curve)) {}

    [[nodiscard]] const LrCurvePtr& curve() const { return curve_; }

    // From now on sets the learning rate of `optimizer`, whose own becomes base_lr, and the momentum if the curve has one.
    // Throws INVALID_STATE if it is attached already, INVALID_ARGUMENT if it has no momentum to set.
    void attach(const std::shared_ptr<Optimizer>& optimizer);

    // The number of steps made: the optimizers have the curve's values at this step.
    [[nodiscard]] int64_t steps() const { return steps_; }
    // After an error the step is unchanged; some optimizers may have the new values, which calling again repeats.
    void set_steps(int64_t steps);
    void step();
    void check_step() const;  // throws as step()

    [[nodiscard]] LrScheduleState state() const;
    // Throws MISMATCH if the state belongs to another curve or number of optimizers.
    void check_state(const LrScheduleState& state) const;
    void load_state(const LrScheduleState& state);

   private:
    [[nodiscard]] int64_t next() const;
    void check_steps(int64_t steps) const;  // throws as set_steps()

    struct Driven {
        std::weak_ptr<Optimizer> optimizer;
        double base_lr;
    };

    LrCurvePtr curve_;
    int64_t steps_ = 0;
    std::vector<Driven> driven_;
};

}  // namespace tsr
