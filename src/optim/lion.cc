#include "optim/lion.hpp"

#include <array>
#include <tuple>

#include "optim/kernels.hpp"

namespace tsr {

namespace {

constexpr std::array<std::string_view, 1> moment_names{"exp_avg"};

void check(const LionOptions& options) {
    check_betas({options.beta1, options.beta2});
    check_not_negative("weight_decay", options.weight_decay);
}

template <class T>
LionStep<T> prepared(const LionOptions& options, double lr) {
    return {static_cast<T>(options.beta1),
            static_cast<T>(1 - options.beta1),
            static_cast<T>(options.beta2),
            static_cast<T>(1 - options.beta2),
            static_cast<T>(lr),
            static_cast<T>(1 - lr * options.weight_decay)};
}

}  // namespace

Lion::Lion(std::vector<OptimizerParam> params, const LionOptions& options, std::shared_ptr<SharedCopy> copy)
    : Optimizer(std::move(params), options.lr, moment_names, std::move(copy)), options_(options) {
    check(options);
}

void Lion::update(int64_t /*step*/, std::span<const ParamSlice> slices) {
    const auto in_float = prepared<float>(options_, lr());
    const auto in_double = prepared<double>(options_, lr());
    if (OnDevice* device = on_device()) [[unlikely]]
        return device->one_moment<LionStep>(updated(slices), in_float, in_double);
    for (const ParamSlice& slice : slices) {
        before_write(slice.param);
        const auto run = [&]<class T>(const LionStep<T>& prepared_step) {
            one_moment_update(reinterpret_cast<T*>(value_data(slice)), reinterpret_cast<const T*>(slice.grad),
                              reinterpret_cast<T*>(moment_data(slice, 0)), slice.count, prepared_step);
        };
        if (params()[slice.param].value.dtype == DType::f32) {
            run(in_float);
        } else {
            run(in_double);
        }
    }
}

Settings Lion::own_settings() const {
    return {{"betas", std::vector<double>{options_.beta1, options_.beta2}}, {"weight_decay", options_.weight_decay}};
}

void Lion::load_own_settings(const Settings& settings) {
    LionOptions loaded = options_;
    std::tie(loaded.beta1, loaded.beta2) = betas_in(settings);
    loaded.weight_decay = setting<double>(settings, "weight_decay");
    check(loaded);
    options_ = loaded;
}

}  // namespace tsr
