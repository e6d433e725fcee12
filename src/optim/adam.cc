#include "optim/adam.hpp"

#include <array>
#include <cmath>
#include <tuple>

#include "optim/kernels.hpp"

namespace tsr {

namespace {

constexpr std::array<std::string_view, 3> moment_names{"exp_avg", "exp_avg_sq", step_moment};

void check(const AdamOptions& options) {
    check_betas({options.beta1, options.beta2});
    check_not_negative("eps", options.eps);
    check_not_negative("weight_decay", options.weight_decay);
}

template <class T>
AdamStep<T> prepared(const AdamOptions& options, double lr, int64_t step) {
    const double bias_correction1 = 1 - std::pow(options.beta1, static_cast<double>(step));
    const double bias_correction2 = 1 - std::pow(options.beta2, static_cast<double>(step));
    const bool decoupled = options.decay == Decay::decoupled;
    AdamStep<T> result{};
    result.beta1 = static_cast<T>(options.beta1);
    result.one_minus_beta1 = static_cast<T>(1 - options.beta1);
    result.beta2 = static_cast<T>(options.beta2);
    result.one_minus_beta2 = static_cast<T>(1 - options.beta2);
    result.step_size = static_cast<T>(lr / bias_correction1);
    result.bias_correction2_sqrt = static_cast<T>(std::sqrt(bias_correction2));
    result.eps = static_cast<T>(options.eps);
    result.weight_decay = static_cast<T>(decoupled ? 0 : options.weight_decay);
    result.keep = static_cast<T>(decoupled ? 1 - lr * options.weight_decay : 1);
    return result;
}

}  // namespace

Adam::Adam(std::vector<OptimizerParam> params, const AdamOptions& options, std::shared_ptr<SharedCopy> copy)
    : Optimizer(std::move(params), options.lr, moment_names, std::move(copy)), options_(options) {
    check(options);
}

std::string_view Adam::kind() const { return options_.decay == Decay::decoupled ? "adamw" : "adam"; }

void Adam::update(int64_t step, std::span<const ParamSlice> slices) {
    const auto in_float = prepared<float>(options_, lr(), step);
    const auto in_double = prepared<double>(options_, lr(), step);
    if (OnDevice* device = on_device()) [[unlikely]]
        return device->adam(updated(slices), in_float, in_double);
    for (const ParamSlice& slice : slices) {
        before_write(slice.param);
        const auto run = [&]<class T>(const AdamStep<T>& prepared_step) {
            adam_update(reinterpret_cast<T*>(value_data(slice)), reinterpret_cast<const T*>(slice.grad),
                        reinterpret_cast<T*>(moment_data(slice, 0)), reinterpret_cast<T*>(moment_data(slice, 1)),
                        slice.count, prepared_step);
        };
        if (params()[slice.param].value.dtype == DType::f32) {
            run(in_float);
        } else {
            run(in_double);
        }
    }
}

Settings Adam::own_settings() const {
    return {{"betas", std::vector<double>{options_.beta1, options_.beta2}},
            {"eps", options_.eps},
            {"weight_decay", options_.weight_decay}};
}

void Adam::load_own_settings(const Settings& settings) {
    AdamOptions loaded = options_;
    std::tie(loaded.beta1, loaded.beta2) = betas_in(settings);
    loaded.eps = setting<double>(settings, "eps");
    loaded.weight_decay = setting<double>(settings, "weight_decay");
    check(loaded);
    options_ = loaded;
}

}  // namespace tsr
