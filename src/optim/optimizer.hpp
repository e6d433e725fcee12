// What all optimizers share: parameters and gradients are the caller's memory, moments are the optimizer's own, in one
// allocation (which ranks of a host may share), and settings are named values. Moments and settings are what a checkpoint
// saves; they are written in place by a load. The formulas are PyTorch's (torch.optim, the single-tensor forms), computed
// element by element without fused multiply-add, so that every machine gets the same bits. Owned by one thread.
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
#include "tensor/layout.hpp"
#include "tensor/shared_copy.hpp"
#include "tensor/tensor.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr {

// Of what is a part of a larger tensor, its boxes one after the other: who holds which, and the rank that holds this one.
struct Held {
    Layout layout;
    int rank = 0;
    int replica = 0;  // which of those that hold the same
};

struct OptimizerParam {
    std::string name;
    Tensor value;
    Tensor grad;
    std::optional<Held> held{};  // none: it is whole
};

// State that belongs to one parameter: "exp_avg" of "fc1.weight". `tensor` lives as long as the optimizer, and is what the
// parameter is: whole, or one box.
struct Moment {
    std::string param;
    std::string name;
    Tensor tensor;
    std::optional<Held> held{};
};

// Some elements of a parameter, with as many of a gradient, which may lie elsewhere than the parameter's own.
struct ParamSlice {
    size_t param = 0;
    size_t begin = 0;
    size_t count = 0;
    const std::byte* grad = nullptr;  // of the first of them
};

using Setting = std::variant<bool, int64_t, double, std::vector<double>>;
using Settings = std::vector<std::pair<std::string, Setting>>;

class Optimizer {
   public:
    virtual ~Optimizer();
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    [[nodiscard]] virtual std::string_view kind() const = 0;  // "sgd", "adam", "adamw"

    void step();
    void zero_grad();

    // A step in parts, when others make it (let_others_step): step_some of each parameter once, from one thread at a time,
    // then end_step. The same bits as step(), which is refused then.
    void step_some(std::span<const size_t> params);
    void end_step();
    void let_others_step() { others_step_ = true; }
    // The same of slices, where the moments are shared and each of those who share them updates some: all call
    // before_write of a parameter before any of them updates a slice of it, one of them write_step_moments, all end_step.
    void step_slices(std::span<const ParamSlice> slices) { update(steps_ + 1, slices); }
    void before_write(size_t param);
    void write_step_moments(int64_t step);

    // The p-norm (p from 1 to infinity) of all gradients, of those who hold parts of them together; if it is above `max_norm`
    // they are scaled to it. If there are infinities or NaN it is infinite, and they are left alone. Collective where parts
    // are held.
    double clip_grad_norm(double max_norm, double p);
    void clip_grad_value(double most);
    // Divides all gradients by `scale`. Returns whether they are all finite then, of those who hold parts of them together.
    // Collective where parts are held.
    bool unscale_grads(double scale);

    [[nodiscard]] const std::vector<OptimizerParam>& params() const { return params_; }
    [[nodiscard]] double lr() const { return lr_; }
    void set_lr(double lr);
    [[nodiscard]] int64_t steps() const { return steps_; }

    // In order of parameters, then of names; the same list for the life of the optimizer.
    [[nodiscard]] const std::vector<Moment>& moments() const { return moments_; }
    // What the moments are in; nullptr: they are this optimizer's alone.
    [[nodiscard]] const std::shared_ptr<SharedCopy>& shared_copy() const { return copy_; }
    // PyTorch's names of a parameter group ("lr", "betas", ...) and "step".
    [[nodiscard]] Settings settings() const;
    // Takes settings of an optimizer of this kind, after the moments were loaded. All names must be there, but "step": the
    // count of steps is what the moments show, of which alone a load may have been. Throws INVALID_ARGUMENT and changes nothing.
    void load_settings(const Settings& settings);

    // Owns the parameters' values and the moments: who copies them in the background has them copied before a step
    // changes them.
    [[nodiscard]] const std::shared_ptr<WriteBarrier>& barrier() const { return barrier_; }

    // Of parameters of which each rank holds a part: adds up a number of each, or finds the largest.
    enum class Over { sum, max };
    // `in_one_call` runs a body in which that is not refused (Communicator::in_one_call).
    void set_together(
        std::function<double(double own, Over how)> together,
        std::function<void(FunctionRef<void()> body)> in_one_call = [](auto body) { body(); }) {
        together_ = std::move(together);
        in_one_call_ = std::move(in_one_call);
    }

    // Called before gradients or parameters are touched, the second before a step in place of the first; may throw
    // INVALID_STATE and change nothing. The third is told that a step begins. They keep alive what they capture.
    void set_gate(std::function<void()> gate, std::function<void()> before_step = {},
                  std::function<void()> steps_now = {}) {
        gate_ = std::move(gate);
        before_step_ = before_step ? std::move(before_step) : gate_;
        steps_now_ = std::move(steps_now);
    }
    // The model that it is an optimizer of; nullptr: of tensors of the caller's.
    void set_model(const void* model) { model_ = model; }
    [[nodiscard]] const void* model() const { return model_; }
    // Throws why step() would be refused.
    void check_step() const;

    // Whether a parameter has a gradient. step() leaves those without as they are, their moments and their count of steps too.
    // zero_grad() calls `zeroed`.
    void set_has_grad(std::function<bool(size_t param)> has_grad, std::function<void()> zeroed) {
        has_grad_ = std::move(has_grad);
        zeroed_ = std::move(zeroed);
    }

   protected:
    // The moments are in `copy`, which is collective then; without one they are this optimizer's alone.
    Optimizer(std::vector<OptimizerParam> params, double lr, std::span<const std::string_view> moment_names,
              std::shared_ptr<SharedCopy> copy);

    // Makes step number `step` (from 1) for these slices. Calls before_write() of each parameter before it changes
    // that or its moments.
    virtual void update(int64_t step, std::span<const ParamSlice> slices) = 0;
    // The settings of the kind besides lr and step; the second takes them back, all or none.
    [[nodiscard]] virtual Settings own_settings() const = 0;
    virtual void load_own_settings(const Settings& settings) = 0;

    // Of a slice's first element.
    [[nodiscard]] std::byte* value_data(const ParamSlice& slice) const;
    [[nodiscard]] std::byte* moment_data(const ParamSlice& slice, size_t moment) const;

   private:
    [[nodiscard]] std::vector<ParamSlice> whole(std::span<const size_t> params) const;
    [[nodiscard]] int64_t steps_of(size_t param, int64_t steps) const;
    [[nodiscard]] int64_t of_moments(int64_t steps) const;
    void refuse_if_others_step(const char* why) const;

    std::vector<OptimizerParam> params_;
    std::vector<Moment> moments_;
    size_t moments_per_param_;
    std::shared_ptr<std::byte> memory_;  // of all moments
    std::shared_ptr<SharedCopy> copy_;
    double lr_;
    int64_t steps_ = 0;
    std::vector<int64_t> left_out_;  // steps without it, of each parameter
    bool others_step_ = false;
    std::function<void()> gate_;
    std::function<void()> before_step_;
    std::function<bool(size_t param)> has_grad_;
    std::function<void()> zeroed_;
    std::function<double(double own, Over how)> together_;
    std::function<void(FunctionRef<void()> body)> in_one_call_ = [](auto body) { body(); };
    std::function<void()> steps_now_;
    const void* model_ = nullptr;
    std::shared_ptr<WriteBarrier> barrier_;
};

// The "step" moment: a 0-d f32 tensor a parameter, for PyTorch's readers; the count itself is the setting "step".
inline constexpr std::string_view step_moment = "step";

// A setting by name; throws INVALID_ARGUMENT if it is missing or of another type.
template <class T>
[[nodiscard]] T setting(const Settings& settings, std::string_view name);

// Throws INVALID_ARGUMENT unless `value` is finite and not negative.
void check_not_negative(const char* name, double value);

}  // namespace tsr
