#include "optim/optimizer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <unordered_set>

#include "base/error.hpp"
#include "optim/clip.hpp"
#include "tensor/overlap.hpp"

namespace tsr {

namespace {

constexpr size_t alignment = 64;  // a cache line, and the widest vector

size_t aligned(size_t size) { return (size + alignment - 1) / alignment * alignment; }

std::string text_of(Device device) {
    return device.type == DeviceType::cpu ? "the CPU" : fmt::format("CUDA device {}", device.index);
}

bool is_same(Device a, Device b) { return a.type == b.type && (a.type == DeviceType::cpu || a.index == b.index); }

void check(const OptimizerParam& param, Device device) {
    const auto refuse = [&](const std::string& why) {
        throw Error(Code::invalid_argument, fmt::format("parameter \"{}\" {}", param.name, why));
    };
    if (param.value.dtype != DType::f32 && param.value.dtype != DType::f64) {
        refuse(fmt::format("is {}; optimizers update only f32 and f64", name_of(param.value.dtype)));
    }
    if (!is_same(param.value.device, device)) {
        refuse(fmt::format("is on {}, but the first one is on {}; an optimizer takes parameters of one device",
                           text_of(param.value.device), text_of(device)));
    }
    if (param.grad.dtype != param.value.dtype || !is_same(param.grad.device, device)) {
        refuse(fmt::format("is {}, but its gradient is {} or on another device", name_of(param.value.dtype),
                           name_of(param.grad.dtype)));
    }
    if (param.grad.shape != param.value.shape) {
        refuse(fmt::format("has shape {}, but its gradient has shape {}", param.value.shape.str(),
                           param.grad.shape.str()));
    }
}

Memory memory_of(const Tensor& tensor) { return {tensor.data, tensor.size_bytes()}; }

Tensor moment_like(const Tensor& value, std::string_view name) {
    Tensor tensor = value;
    if (name == step_moment) tensor = Tensor{nullptr, Dims{}, DType::f32, {}};
    return tensor;
}

constexpr double infinite = std::numeric_limits<double>::infinity();

double root_of(double sum, double p) { return p == 1 ? sum : p == 2 ? std::sqrt(sum) : std::pow(sum, 1 / p); }

std::shared_ptr<std::byte> own_memory(size_t size) {
    std::shared_ptr<std::byte> memory(static_cast<std::byte*>(::operator new(size, std::align_val_t{alignment})),
                                      [](std::byte* begin) { ::operator delete(begin, std::align_val_t{alignment}); });
    std::memset(memory.get(), 0, size);
    return memory;
}

}  // namespace

Optimizer::Optimizer(std::vector<OptimizerParam> params, double lr, std::span<const std::string_view> moment_names,
                     std::shared_ptr<SharedCopy> copy)
    : params_(std::move(params)), moments_per_param_(moment_names.size()), copy_(std::move(copy)), lr_(lr) {
    if (params_.empty()) throw Error(Code::invalid_argument, "the optimizer has no parameters");
    left_out_.assign(params_.size(), 0);
    check_not_negative("lr", lr);
    std::unordered_set<std::string_view> names;
    std::vector<Tensor> values;
    for (const OptimizerParam& param : params_) {
        check(param, params_[0].value.device);
        if (!names.insert(param.name).second) {
            throw Error(Code::invalid_argument, fmt::format("two parameters are named \"{}\"", param.name));
        }
        values.push_back(param.value);
        for (const std::string_view name : moment_names) {
            moments_.push_back({param.name, std::string(name), moment_like(param.value, name),
                                name == step_moment ? std::nullopt : param.held});
        }
    }
    if (const auto shared = find_overlap(values)) {
        throw Error(
            Code::invalid_argument,
            fmt::format("parameters \"{}\" and \"{}\" share memory, which would be updated twice; give it to the "
                        "optimizer once",
                        params_[shared->first].name, params_[shared->second].name));
    }
    allocate_moments();
}

// Those on a device lie there, all others on the CPU.
void Optimizer::allocate_moments() {
    const Device device = params_[0].value.device;
    if (device.type != DeviceType::cpu) on_device_ = std::make_unique<OnDevice>(device, params_);
    size_t size = 0;
    size_t device_size = 0;
    const auto size_for = [&](const Moment& moment) -> size_t& {
        return moment.tensor.device.type == DeviceType::cpu ? size : device_size;
    };
    for (const Moment& moment : moments_) size_for(moment) += aligned(moment.tensor.size_bytes());
    if (size > 0) memory_ = copy_ ? copy_->allocate(size) : own_memory(size);
    if (device_size > 0) device_memory_ = on_device_->api().allocate_zeroed(device_size);
    std::vector<Memory> owned{{memory_.get(), size}, {device_memory_.get(), device_size}};
    for (const OptimizerParam& param : params_) owned.push_back(memory_of(param.value));
    barrier_ = std::make_shared<WriteBarrier>(std::move(owned));

    size = device_size = 0;  // from here on offsets
    for (Moment& moment : moments_) {
        const auto& memory = moment.tensor.device.type == DeviceType::cpu ? memory_ : device_memory_;
        size_t& offset = size_for(moment);
        moment.tensor.data = memory.get() + offset;
        offset += aligned(moment.tensor.size_bytes());
    }
}

Optimizer::~Optimizer() { barrier_->before_write_all(); }

void Optimizer::before_write(size_t param) {
    barrier_->before_write(memory_of(params_[param].value));
    for (size_t moment = 0; moment < moments_per_param_; ++moment) {
        barrier_->before_write(memory_of(moments_[param * moments_per_param_ + moment].tensor));
    }
}

std::byte* Optimizer::value_data(const ParamSlice& slice) const {
    const Tensor& value = params_[slice.param].value;
    return value.data + slice.begin * size_of(value.dtype);
}

std::byte* Optimizer::moment_data(const ParamSlice& slice, size_t moment) const {
    const Tensor& tensor = moments_[slice.param * moments_per_param_ + moment].tensor;
    return tensor.data + slice.begin * size_of(tensor.dtype);
}

std::vector<OnDevice::Updated> Optimizer::updated(std::span<const ParamSlice> slices) {
    std::vector<OnDevice::Updated> result;
    result.reserve(slices.size());
    for (const ParamSlice& slice : slices) {
        before_write(slice.param);
        OnDevice::Updated& one = result.emplace_back();
        one.dtype = params_[slice.param].value.dtype;
        one.elements = slice.count;
        one.param = value_data(slice);
        one.grad = slice.grad;
        size_t known = 0;
        for (size_t i = 0; i < moments_per_param_; ++i) {
            const bool is_count = moments_[slice.param * moments_per_param_ + i].name == step_moment;
            if (!is_count) one.moments[known++] = moment_data(slice, i);
        }
    }
    return result;
}

void Optimizer::fill_moments(std::string_view name, double value) {
    if (copy_ && copy_->place() != 0)
        return;  // the first of the ranks that share them does it, before any of them steps
    for (const Moment& moment : moments_) {
        const Tensor& tensor = moment.tensor;
        if (moment.name != name || tensor.numel() == 0) continue;
        if (tensor.device.type != DeviceType::cpu) {
            on_device_->fill(tensor, value);
        } else if (tensor.dtype == DType::f32) {
            std::ranges::fill(tensor.as<float>(), static_cast<float>(value));
        } else {
            std::ranges::fill(tensor.as<double>(), value);
        }
    }
}

std::vector<ParamSlice> Optimizer::whole(std::span<const size_t> params) const {
    std::vector<ParamSlice> slices;
    slices.reserve(params.size());
    for (const size_t p : params) {
        slices.push_back({p, 0, static_cast<size_t>(params_[p].value.numel()), params_[p].grad.data});
    }
    return slices;
}

void Optimizer::step_some(std::span<const size_t> params) { update(steps_ + 1, whole(params)); }

void Optimizer::refuse_if_others_step(const char* why) const {
    if (!others_step_) return;
    throw Error(Code::invalid_state, fmt::format("this optimizer steps in the backward pass of its model: {}", why));
}

void Optimizer::refuse_unless_owners(const char* what) const {
    if (advice_.empty() || in_owners_call_) return;
    throw Error(Code::invalid_state, fmt::format("{}: {}", what, advice_));
}

void Optimizer::check_step() const {
    refuse_unless_owners("the optimizer cannot be stepped here");
    refuse_if_others_step("the step is already done");
    if (before_step_) before_step_();
}

void Optimizer::step() {
    check_step();
    if (steps_now_) steps_now_();
    std::map<int64_t, std::vector<size_t>> by_left_out;
    for (size_t p = 0; p < params_.size(); ++p) {
        if (has_grad_ && !has_grad_(p)) {
            ++left_out_[p];
        } else {
            by_left_out[left_out_[p]].push_back(p);
        }
    }
    for (const auto& [left_out, params] : by_left_out) update(steps_ + 1 - left_out, whole(params));
    end_step();
}

void Optimizer::end_step() {
    ++steps_;
    if (!copy_) write_step_moments(steps_);
    counter_.count(steps_);
}

void Optimizer::write_step_moments(int64_t step) {
    for (size_t i = 0; i < moments_.size(); ++i) {
        if (moments_[i].name != step_moment) continue;
        const auto count = static_cast<float>(step - left_out_[i / moments_per_param_]);
        std::memcpy(moments_[i].tensor.data, &count, sizeof count);
    }
}

void Optimizer::zero_grad() {
    refuse_unless_owners("the optimizer cannot set the gradients to zero here");
    if (gate_) gate_();
    if (on_device_) [[unlikely]] {
        on_device_->zero_grads(params_);
    } else {
        for (const OptimizerParam& param : params_) {
            if (param.grad.size_bytes() > 0) std::memset(param.grad.data, 0, param.grad.size_bytes());
        }
    }
    if (zeroed_) zeroed_();
}

void Optimizer::count_elsewhere(std::span<const size_t> params) {
    for (const size_t param : params) params_[param].counted = false;
    counted_ = true;
}

void Optimizer::join_sums(ExactSums& sums) const {
    for (const Together& together : together_) {
        if (together.of_params) together.of_params(sums);
    }
}

double Optimizer::joined(double own, Over how) const {
    for (const Together& together : together_) own = together.of_ranks(own, how);
    return own;
}

void Optimizer::in_one_call(std::span<const Together> together, FunctionRef<void()> body) const {
    if (together.empty()) return body();
    together.front().in_one_call([&] { in_one_call(together.subspan(1), body); });
}

double Optimizer::clip_grad_norm(double max_norm, double p) {
    refuse_unless_owners("the optimizer cannot clip the gradients here");
    check_not_negative("max_norm", max_norm);
    if (!(p >= 1))
        throw Error(Code::invalid_argument, fmt::format("the norm's p is {}; it must be at least 1 or infinite", p));
    refuse_if_others_step("its gradients cannot be clipped");
    if (before_clip_) before_clip_();
    double sum = on_device_ ? on_device_->power_sum(params_, p) : power_sum(params_, p);
    if (std::isnan(sum)) sum = infinite;  // as the maximum over the ranks is, too
    sum = joined(sum, std::isinf(p) ? Over::max : Over::sum);
    double norm = std::isinf(p) ? sum : root_of(sum, p);
    constexpr double eps = 1e-6;  // PyTorch's
    double factor = max_norm / (norm + eps);
    // Finite gradients may have powers that overflow; every rank has the same norm so far. A device adds no others up.
    if (std::isinf(norm) && !std::isinf(p) && !on_device_) {
        double largest = power_sum(params_, infinite);
        largest = joined(std::isnan(largest) ? infinite : largest, Over::max);
        if (std::isfinite(largest)) {
            const double root = root_of(joined(power_sum_in(largest, params_, p), Over::sum), p);
            norm = std::min(largest * root, std::numeric_limits<double>::max());
            factor = norm > max_norm ? max_norm / largest / root : 1;
        }
    }
    if (std::isfinite(norm) && factor < 1) {
        on_device_ ? on_device_->scale_grads(params_, factor) : scale_grads(params_, factor);
    }
    return norm;
}

void Optimizer::clip_grad_value(double most) {
    refuse_unless_owners("the optimizer cannot clip the gradients here");
    check_not_negative("the clip value", most);
    refuse_if_others_step("its gradients cannot be clipped");
    if (before_clip_) before_clip_();
    on_device_ ? on_device_->bound_grads(params_, most) : bound_grads(params_, most);
}

bool Optimizer::unscale_grads(double scale) {
    refuse_unless_owners("the optimizer cannot unscale the gradients here");
    refuse_if_others_step("its gradients cannot be unscaled");
    if (gate_) gate_();
    double overflow = 0;
    in_one_call(together_, [&] {
        const bool finite = on_device_ ? on_device_->scale_grads_finitely(params_, 1 / scale)
                                       : scale_grads_finitely(params_, 1 / scale);
        overflow = finite ? 0 : 1;
        overflow = joined(overflow, Over::max);
    });
    return overflow == 0;
}

void Optimizer::set_stream(StreamHandle stream) {
    if (on_device_) {
        on_device_->set_stream(stream);
    } else {
        cpu_device().check_stream(stream);
    }
}

void Optimizer::set_lr(double lr) {
    check_not_negative("lr", lr);
    if (others_step_ && gate_) gate_();  // their thread reads lr_
    lr_ = lr;
}

void Optimizer::check_momentum_value(double momentum) {
    if (momentum > 0 && momentum < 1) return;
    throw Error(Code::invalid_argument,
                fmt::format("the momentum is {}; while training it must be above 0 and below 1", momentum));
}

void Optimizer::set_momentum(double momentum) {
    check_momentum();
    check_momentum_value(momentum);
    if (others_step_ && gate_) gate_();
    set_own_momentum(momentum);
}

Settings Optimizer::settings() const {
    Settings result{{"lr", lr_}};
    for (auto& own : own_settings()) result.push_back(std::move(own));
    result.emplace_back("step", steps_);
    return result;
}

bool Optimizer::is_used(const Moment& moment) const {
    const Memory memory = memory_of(moment.tensor);
    if (moment.tensor.device.type != DeviceType::cpu) return on_device_->is_any_set(memory);
    return std::ranges::any_of(memory, [](std::byte b) { return b != std::byte{0}; });
}

// The step count stored in the moments of a parameter; if they store none, `steps`, or 0 if the moments were never
// written.
int64_t Optimizer::steps_of(size_t param, int64_t steps) const {
    bool is_written = moments_per_param_ == 0;
    for (size_t i = param * moments_per_param_; i < (param + 1) * moments_per_param_; ++i) {
        const Moment& moment = moments_[i];
        if (moment.name == step_moment) return std::min(steps, static_cast<int64_t>(moment.tensor.as<float>()[0]));
        is_written = is_written || is_used(moment);
    }
    return is_written ? steps : 0;
}

// The step count stored in the moments; `steps` if the moments are consistent with it.
int64_t Optimizer::of_moments(int64_t steps) const {
    std::optional<float> shown;
    for (const Moment& moment : moments_) {
        if (moment.name != step_moment) continue;
        const float count = moment.tensor.as<float>()[0];
        if (!(count >= 0 && count < 0x1p62F)) {
            throw Error(
                Code::invalid_argument,
                fmt::format("the step of \"{}\" is {}; it must be at least 0 and below 2^62", moment.param, count));
        }
        shown = std::max(shown.value_or(0), count);
    }
    if (shown) return *shown == static_cast<float>(steps) ? steps : static_cast<int64_t>(*shown);
    const auto used = [this](const Moment& moment) { return is_used(moment); };
    return steps == 0 && std::ranges::any_of(moments_, used) ? 1 : steps;  // so that momentum is not overwritten
}

void Optimizer::load_settings(const Settings& settings) {
    const Settings known = this->settings();
    for (const auto& [name, value] : settings) {
        const auto same_name = [&name = name](const auto& entry) { return entry.first == name; };
        if (std::none_of(known.begin(), known.end(), same_name)) {
            throw Error(Code::invalid_argument, fmt::format("{} has no setting \"{}\"", kind(), name));
        }
    }
    const auto lr = setting<double>(settings, "lr");
    check_not_negative("lr", lr);
    int64_t steps = 0;
    if (std::any_of(settings.begin(), settings.end(), [](const auto& entry) { return entry.first == "step"; })) {
        steps = setting<int64_t>(settings, "step");
    }
    if (steps < 0 || steps >= int64_t{1} << 62) {
        throw Error(Code::invalid_argument, fmt::format("step is {}; it must be at least 0 and below 2^62", steps));
    }
    steps = of_moments(steps);
    load_own_settings(settings);
    lr_ = lr;
    steps_ = steps;
    for (size_t p = 0; p < params_.size(); ++p) left_out_[p] = steps - steps_of(p, steps);
}

template <class T>
T setting(const Settings& settings, std::string_view name) {
    for (const auto& [key, value] : settings) {
        if (key != name) continue;
        if (const T* found = std::get_if<T>(&value)) return *found;
        throw Error(Code::invalid_argument, fmt::format("the setting \"{}\" has the wrong type", name));
    }
    throw Error(Code::invalid_argument, fmt::format("the setting \"{}\" is missing", name));
}

template bool setting<bool>(const Settings&, std::string_view);
template int64_t setting<int64_t>(const Settings&, std::string_view);
template double setting<double>(const Settings&, std::string_view);
template std::vector<double> setting<std::vector<double>>(const Settings&, std::string_view);

void check_betas(const Betas& betas) {
    for (const auto& [name, beta] : {std::pair{"beta1", betas.first}, std::pair{"beta2", betas.second}}) {
        if (beta >= 0 && beta < 1) continue;
        throw Error(Code::invalid_argument, fmt::format("{} is {}; it must be at least 0 and below 1", name, beta));
    }
}

Betas betas_in(const Settings& settings) {
    const auto betas = setting<std::vector<double>>(settings, "betas");
    if (betas.size() != 2) {
        throw Error(Code::invalid_argument, fmt::format("the setting \"betas\" has {} numbers, not 2", betas.size()));
    }
    return {betas[0], betas[1]};
}

void check_not_negative(const char* name, double value) {
    if (std::isfinite(value) && value >= 0) return;
    throw Error(Code::invalid_argument, fmt::format("{} is {}; it must be finite and not negative", name, value));
}

}  // namespace tsr
