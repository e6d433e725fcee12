// The base of all optimizers. Parameters and gradients are the caller's memory; moments belong to the optimizer, in one
// allocation (which ranks of a host may share); settings are named values. A checkpoint saves moments and settings, and
// a load writes them in place. The formulas are PyTorch's (torch.optim, single-tensor forms), computed element by
// element without fused multiply-add, so that every machine gets the same bits. Parameters are on the CPU, or all on one
// CUDA device, where moments, steps and norms are then too (on_device.hpp). Owned by one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/function_ref.hpp"
#include "base/meter.hpp"
#include "optim/on_device.hpp"
#include "optim/param.hpp"
#include "tensor/layout.hpp"
#include "tensor/shared_copy.hpp"
#include "tensor/tensor.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr {

class ExactSums;

// State that belongs to one parameter: "exp_avg" of "fc1.weight". `tensor` lives as long as the optimizer and covers
// the same part as the parameter.
struct Moment {
    std::string param;
    std::string name;
    Tensor tensor;
    std::optional<Held> held{};
};

// A range of elements of a parameter and the corresponding elements of a gradient, which may be stored elsewhere than
// the parameter's own.
struct ParamSlice {
    size_t param = 0;
    size_t begin = 0;
    size_t count = 0;
    const std::byte* grad = nullptr;  // the gradient of the first element
};

using Setting = std::variant<bool, int64_t, double, std::vector<double>>;
using Settings = std::vector<std::pair<std::string, Setting>>;

class Optimizer {
   public:
    virtual ~Optimizer();
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    [[nodiscard]] virtual std::string_view kind() const = 0;  // "sgd", "adam", "adamw", "adagrad", "lion", "lamb"

    void step();
    void zero_grad();

    // A step in parts, made by others (let_others_step): call step_some once for each parameter, from one thread at a
    // time, then end_step. It gives the same bits as step(), which is then refused.
    void step_some(std::span<const size_t> params);
    void end_step();
    void let_others_step() { others_step_ = true; }
    // The same for slices, if the moments are shared and each rank that shares them updates some. All call before_write
    // of a parameter before any of them updates a slice of it; one calls write_step_moments; all call end_step.
    void step_slices(std::span<const ParamSlice> slices) { update(steps_ + 1, slices); }
    void before_write(size_t param);
    void write_step_moments(int64_t step);

    // Returns the p-norm (p from 1 to infinity) of all gradients, over all ranks that hold parts of them; if it is
    // above `max_norm`, the gradients are scaled to it. With infinities or NaN the norm is infinite and the gradients
    // stay unchanged; on a CUDA device, also if the powers of f64 gradients overflow. Collective if ranks hold parts.
    double clip_grad_norm(double max_norm, double p);
    void clip_grad_value(double most);
    // Divides all gradients by `scale`. Returns whether all results are finite, over all ranks that hold parts of them.
    // Collective if ranks hold parts.
    bool unscale_grads(double scale);

    // The stream of a device in whose order all calls above run; nullptr is its default stream, and the CPU's only one. What the
    // former stream, which still exists, has of this optimizer comes first. Throws INVALID_ARGUMENT for a stream of another
    // device.
    void set_stream(StreamHandle stream);

    [[nodiscard]] const std::vector<OptimizerParam>& params() const { return params_; }
    [[nodiscard]] double lr() const { return lr_; }
    void set_lr(double lr);
    // Of SGD, or beta1 of others. Throws INVALID_ARGUMENT if it is out of range, or for an optimizer that has none.
    void set_momentum(double momentum);
    virtual void check_momentum() const {}              // throws as set_momentum() if there is none
    static void check_momentum_value(double momentum);  // throws as set_momentum() if it is out of range
    [[nodiscard]] int64_t steps() const { return steps_; }

    // Ordered by parameter, then by name; the same list for the life of the optimizer.
    [[nodiscard]] const std::vector<Moment>& moments() const { return moments_; }
    // The shared copy that holds the moments; nullptr: only this optimizer uses them.
    [[nodiscard]] const std::shared_ptr<SharedCopy>& shared_copy() const { return copy_; }
    // PyTorch's names of a parameter group ("lr", "betas", ...) and "step".
    [[nodiscard]] Settings settings() const;
    // Restores settings of an optimizer of this kind, after the moments were loaded. All names are required except
    // "step": the step count comes from the moments, because a load may have covered only these. On INVALID_ARGUMENT
    // nothing changes.
    void load_settings(const Settings& settings);

    // Covers the parameters' values and the moments, so that a background copy of them is completed before a step
    // changes them.
    [[nodiscard]] const std::shared_ptr<WriteBarrier>& barrier() const { return barrier_; }

    // For models of which each rank holds a part: the sum or maximum of one number per rank. What is added later joins
    // what the ones before have joined. `in_one_call` runs a body in which `together` is not refused
    // (Communicator::in_one_call).
    enum class Over { sum, max };
    struct Together {
        std::function<double(double own, Over how)> of_ranks;
        std::function<void(FunctionRef<void()> body)> in_one_call = [](auto body) { body(); };
        // Each sum becomes that of all ranks, for sums over the elements of each parameter. None: the ranks have different
        // parameters.
        std::function<void(ExactSums& sums)> of_params{};
    };
    void add_together(Together together) { together_.push_back(std::move(together)); }
    // A step needs norms of full parameters. It is then collective if ranks hold parts of them, and cannot run in the backward
    // pass there.
    [[nodiscard]] virtual bool needs_norms() const { return false; }
    // Called once, with the parameters whose gradients other ranks count.
    void count_elsewhere(std::span<const size_t> params);
    [[nodiscard]] bool is_counted() const { return counted_; }

    // `gate` is called before gradients or parameters are touched, and `before_step` instead of it before a step; they
    // may throw INVALID_STATE, in which case nothing changes. `steps_now` is called when a step begins. They keep alive
    // what they capture.
    void set_gate(std::function<void()> gate, std::function<void()> before_step = {},
                  std::function<void()> steps_now = {}) {
        gate_ = std::move(gate);
        before_step_ = before_step ? std::move(before_step) : gate_;
        before_clip_ = gate_;
        steps_now_ = std::move(steps_now);
    }
    // Gradients are clipped only when a step may follow. After set_gate.
    void gate_clips_like_steps() { before_clip_ = before_step_; }
    // From now on only its owner steps it and changes gradients, in OwnersCalls. Others get INVALID_STATE: `advice` is what to
    // do instead.
    void own(std::string advice) { advice_ = std::move(advice); }
    class OwnersCall {
       public:
        explicit OwnersCall(Optimizer& optimizer) : optimizer_(optimizer) { optimizer_.in_owners_call_ = true; }
        ~OwnersCall() { optimizer_.in_owners_call_ = false; }
        OwnersCall(const OwnersCall&) = delete;
        OwnersCall& operator=(const OwnersCall&) = delete;

       private:
        Optimizer& optimizer_;
    };
    // The model that it optimizes; nullptr: tensors of the caller.
    void set_model(const void* model) { model_ = model; }
    [[nodiscard]] const void* model() const { return model_; }
    // Throws the error with which step() would be refused, if any.
    void check_step() const;

    // `has_grad` tells whether a parameter has a gradient. step() leaves parameters without one unchanged, including
    // their moments and step count. zero_grad() calls `zeroed`.
    void set_has_grad(std::function<bool(size_t param)> has_grad, std::function<void()> zeroed) {
        has_grad_ = std::move(has_grad);
        zeroed_ = std::move(zeroed);
    }

   protected:
    // The moments are in `copy`, whose allocation is collective; without one they belong to this optimizer alone.
    Optimizer(std::vector<OptimizerParam> params, double lr, std::span<const std::string_view> moment_names,
              std::shared_ptr<SharedCopy> copy);

    // Makes step number `step` (from 1) for these slices. Calls before_write() of each parameter before changing it or
    // its moments.
    virtual void update(int64_t step, std::span<const ParamSlice> slices) = 0;
    // The settings of the kind besides lr and step; load_own_settings restores all of them or none.
    [[nodiscard]] virtual Settings own_settings() const = 0;
    virtual void load_own_settings(const Settings& settings) = 0;
    virtual void set_own_momentum(double momentum) = 0;

    // Sums over the elements that this rank holds become those over full parameters.
    void join_sums(ExactSums& sums) const;
    // Whether no other rank counts this rank's elements of a parameter as well.
    [[nodiscard]] static bool is_first_holder(const OptimizerParam& param) {
        return !param.held || param.held->replica == 0;
    }

    // nullptr: on the CPU.
    [[nodiscard]] OnDevice* on_device() const { return on_device_.get(); }
    // What a device updates for these slices, after before_write() of each parameter.
    [[nodiscard]] std::vector<OnDevice::Updated> updated(std::span<const ParamSlice> slices);
    // The address of a slice's first element.
    [[nodiscard]] std::byte* value_data(const ParamSlice& slice) const;
    // For constructors: moments that do not begin with zeros.
    void fill_moments(std::string_view name, double value);
    [[nodiscard]] std::byte* moment_data(const ParamSlice& slice, size_t moment) const;

   private:
    [[nodiscard]] double joined(double own, Over how) const;
    void in_one_call(std::span<const Together> together, FunctionRef<void()> body) const;
    [[nodiscard]] std::vector<ParamSlice> whole(std::span<const size_t> params) const;
    [[nodiscard]] int64_t steps_of(size_t param, int64_t steps) const;
    [[nodiscard]] int64_t of_moments(int64_t steps) const;
    void refuse_if_others_step(const char* why) const;
    void refuse_unless_owners(const char* what) const;
    void allocate_moments();
    [[nodiscard]] bool is_used(const Moment& moment) const;  // not all zeros

    std::vector<OptimizerParam> params_;
    std::vector<Moment> moments_;
    size_t moments_per_param_;
    std::unique_ptr<OnDevice> on_device_;
    std::shared_ptr<std::byte> memory_;         // of all moments on the CPU; with a device these are the "step" moments
    std::shared_ptr<std::byte> device_memory_;  // of all others
    std::shared_ptr<SharedCopy> copy_;
    double lr_;
    StepCounter counter_{StepCounter::Of::optimizer};
    int64_t steps_ = 0;
    std::vector<int64_t> left_out_;  // per parameter: steps in which it was skipped
    bool others_step_ = false;
    std::string advice_;  // empty: it has no owner
    bool in_owners_call_ = false;
    std::function<void()> gate_;
    std::function<void()> before_step_;
    std::function<void()> before_clip_;
    std::function<bool(size_t param)> has_grad_;
    std::function<void()> zeroed_;
    std::vector<Together> together_;
    bool counted_ = false;  // count_elsewhere() was called
    std::function<void()> steps_now_;
    const void* model_ = nullptr;
    std::shared_ptr<WriteBarrier> barrier_;
};

// The "step" moment: one 0-d f32 tensor per parameter, for readers of PyTorch; the count itself is the setting "step".
inline constexpr std::string_view step_moment = "step";

// A setting by name; throws INVALID_ARGUMENT if it is missing or has the wrong type.
template <class T>
[[nodiscard]] T setting(const Settings& settings, std::string_view name);

// Throws INVALID_ARGUMENT unless `value` is finite and not negative.
void check_not_negative(const char* name, double value);

// Decay rates of two means.
using Betas = std::pair<double, double>;
void check_betas(const Betas& betas);  // throws INVALID_ARGUMENT unless both are at least 0 and below 1
[[nodiscard]] Betas betas_in(const Settings& settings);  // the setting "betas", not checked

}  // namespace tsr
