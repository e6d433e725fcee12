// DeepSpeed's engine: one configuration makes the model, the optimizer and the loss scale, and a step does what it asks.
// The trainer computes; it multiplies its loss by loss_factor() before the backward pass.
//
//     forward(u), forward_done(u)                       for each unit
//     backward(u), ready(i) or unit_ready(u)            for each unit, last first
//     backward_done()                                   the pass is over, its gradients are reduced or accumulated
//     step()                                            at a boundary: unscale, clip, update, set to zero
//
// A boundary is every `accumulation`-th step(), or what set_boundary() says. Gradients of the passes between boundaries add
// up: adds_gradients() says whether a pass writes its gradients or adds to what is there. Whether a step is skipped is the
// same on all ranks, as their gradients are those of all. Owned by one thread; ranks make the same calls.
//
// What a program sets between passes, such as the learning rate, must be the same on all ranks. A pass that reduces gradients
// compares it, in messages that are sent anyway: backward_done() throws the same MISMATCH on all ranks, and so does every
// later pass and step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "engine/batch.hpp"
#include "engine/config.hpp"
#include "engine/loss_scale.hpp"
#include "engine/model.hpp"
#include "engine/step_times.hpp"
#include "optim/lr_schedule.hpp"
#include "optim/optimizer.hpp"

namespace tsr {

class Engine {
   public:
    // Collective: checks that all ranks have the same configuration and model. `comm`: the data-parallel ranks. Tensors are
    // on the CPU and outlive the engine. `schedule`: null, or instead of one that the configuration has.
    Engine(const std::shared_ptr<Communicator>& comm, std::vector<EngineUnit> units, std::string_view config,
           std::shared_ptr<LrSchedule> schedule = nullptr);
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    [[nodiscard]] const EngineConfig& config() const { return config_; }
    [[nodiscard]] const EngineModel& model() const { return *model_; }
    [[nodiscard]] const std::shared_ptr<Optimizer>& optimizer() const { return optimizer_; }
    // Follows the steps that were made, not those that were skipped. Null: there is none.
    [[nodiscard]] const std::shared_ptr<LrSchedule>& schedule() const { return schedule_; }
    [[nodiscard]] const LossScale& loss_scale() const { return loss_scale_; }

    // A unit's parameters are valid between forward() and forward_done(), and between backward() and its last ready().
    void forward(size_t unit);
    void forward_done(size_t unit);
    void backward(size_t unit);
    void ready(size_t param);
    void unit_ready(size_t unit);
    void backward_done();

    // What the loss is multiplied by: the loss scale over the accumulation.
    [[nodiscard]] double loss_factor() const;
    // Whether the gradients of this backward pass must be added to what their memory holds.
    [[nodiscard]] bool adds_gradients() const;

    // Whether the next step() is one of the optimizer.
    [[nodiscard]] bool is_boundary() const;
    // Before a backward pass: overrides is_boundary() from now on; none: as the accumulation says.
    void set_boundary(std::optional<bool> boundary);
    // Between them backward passes are not reduced, and step() is refused. Not from stage 2 on, and not nested.
    void begin_no_sync();
    void end_no_sync();

    // After each backward pass outside no_sync. Returns whether the optimizer made a step.
    bool step();

    void train() { is_training_ = true; }
    // Units are sharded after their forward, as no backward follows.
    void eval() { is_training_ = false; }
    [[nodiscard]] bool is_training() const { return is_training_; }

    struct Counters {
        int64_t global_steps = 0;  // boundaries, with those whose step was skipped
        int64_t global_samples = 0;
        int64_t skipped_steps = 0;
        int64_t micro_steps = 0;
        friend bool operator==(const Counters&, const Counters&) = default;
    };
    [[nodiscard]] const Counters& counters() const { return counters_; }
    // What a checkpoint keeps besides the model, the optimizer and the schedule. Both throw INVALID_STATE from a backward
    // pass to the step of the optimizer.
    struct State {
        Counters counters;
        bool scale_is_dynamic = false;
        LossScale::State scale;
    };
    [[nodiscard]] State state() const;
    void check_state(const State& state) const;  // throws as restore()
    // Throws INVALID_ARGUMENT for values out of range, and changes nothing. A loss scale continues if both are dynamic.
    void restore(const State& state);
    // Of the gradients at the last boundary, before they were clipped and without the loss scale. None: there was no
    // boundary yet, or norms are off; infinite: a gradient was infinite or NaN.
    [[nodiscard]] std::optional<double> grad_norm() const { return grad_norm_; }
    [[nodiscard]] double lr() const { return optimizer_->lr(); }
    void set_lr(double lr) { optimizer_->set_lr(lr); }

    [[nodiscard]] const BatchSizes& batch() const { return batch_; }
    [[nodiscard]] int ranks() const { return comm_->world_size(); }
    // Between steps of the optimizer.
    void set_train_batch_size(int64_t train);
    void set_train_micro_batch_size(int64_t micro);

   private:
    // `due`: a pass has ended whose step() did not come yet.
    enum class Pass { none, begun, due };

    void check_not_failed() const;
    void refuse_in_turn(std::string_view what) const;
    [[nodiscard]] bool reduces() const;
    void begin_pass();
    [[nodiscard]] std::vector<std::string> settings() const;
    void check_settings();
    void check_between_passes(const char* what) const;
    void check_nothing_accumulated(const char* what) const;
    [[nodiscard]] bool continues_scale(const State& state) const;
    [[nodiscard]] bool unscale_and_clip();
    bool step_of_optimizer();
    [[noreturn]] void fail_at_minimum(const Error& why);
    void print_step();
    [[nodiscard]] Error refusal(std::string_view why) const;

    std::shared_ptr<Communicator> comm_;
    EngineConfig config_;
    BatchSizes batch_;
    std::unique_ptr<EngineModel> model_;
    std::shared_ptr<Optimizer> optimizer_;
    std::shared_ptr<LrSchedule> schedule_;
    LossScale loss_scale_{LossScaleOptions{}};

    Pass pass_ = Pass::none;
    int64_t passes_ = 0;  // that have ended since the last boundary
    int64_t steps_ = 0;   // step() calls since the last boundary
    bool in_no_sync_ = false;
    std::optional<bool> boundary_;
    bool is_training_ = true;
    Counters counters_;
    std::optional<double> grad_norm_;
    std::vector<std::string> settings_;   // at the begin of the pass
    std::optional<double> last_step_lr_;  // of the last step of the optimizer
    std::optional<Error> failed_;         // no pass or step is possible any more
    std::optional<StepTimes> times_;      // if they are printed
};

}  // namespace tsr
