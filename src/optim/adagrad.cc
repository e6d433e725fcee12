#include "optim/adagrad.hpp"

#include <array>

#include "base/error.hpp"
#include "optim/kernels.hpp"

namespace tsr {

namespace {

constexpr std::string_view sum_moment = "sum";
constexpr std::array<std::string_view, 2> moment_names{step_moment, sum_moment};
constexpr size_t sum_index = 1;

void check(const AdagradOptions& options) {
    check_not_negative("lr_decay", options.lr_decay);
    check_not_negative("weight_decay", options.weight_decay);
    check_not_negative("initial_accumulator_value", options.initial_accumulator_value);
    check_not_negative("eps", options.eps);
}

template <class T>
AdagradStep<T> prepared(const AdagradOptions& options, double lr, int64_t step) {
    return {static_cast<T>(lr / (1 + static_cast<double>(step - 1) * options.lr_decay)), static_cast<T>(options.eps),
            static_cast<T>(options.weight_decay)};
}

}  // namespace

Adagrad::Adagrad(std::vector<OptimizerParam> params, const AdagradOptions& options, std::shared_ptr<SharedCopy> copy)
    : Optimizer(std::move(params), options.lr, moment_names, std::move(copy)), options_(options) {
    check(options);
    if (options.initial_accumulator_value != 0) fill_moments(sum_moment, options.initial_accumulator_value);
}

void Adagrad::update(int64_t step, std::span<const ParamSlice> slices) {
    const auto in_float = prepared<float>(options_, lr(), step);
    const auto in_double = prepared<double>(options_, lr(), step);
    if (OnDevice* device = on_device()) [[unlikely]]
        return device->one_moment<AdagradStep>(updated(slices), in_float, in_double);
    for (const ParamSlice& slice : slices) {
        before_write(slice.param);
        const auto run = [&]<class T>(const AdagradStep<T>& prepared_step) {
            one_moment_update(reinterpret_cast<T*>(value_data(slice)), reinterpret_cast<const T*>(slice.grad),
                              reinterpret_cast<T*>(moment_data(slice, sum_index)), slice.count, prepared_step);
        };
        if (params()[slice.param].value.dtype == DType::f32) {
            run(in_float);
        } else {
            run(in_double);
        }
    }
}

void Adagrad::check_momentum() const {
    throw Error(
        Code::invalid_argument,
        "Adagrad has no momentum that could change; use another optimizer, or a schedule without cycle_momentum");
}

Settings Adagrad::own_settings() const {
    return {{"lr_decay", options_.lr_decay},
            {"eps", options_.eps},
            {"weight_decay", options_.weight_decay},
            {"initial_accumulator_value", options_.initial_accumulator_value}};
}

void Adagrad::load_own_settings(const Settings& settings) {
    AdagradOptions loaded = options_;
    loaded.lr_decay = setting<double>(settings, "lr_decay");
    loaded.eps = setting<double>(settings, "eps");
    loaded.weight_decay = setting<double>(settings, "weight_decay");
    loaded.initial_accumulator_value = setting<double>(settings, "initial_accumulator_value");
    check(loaded);
    options_ = loaded;
}

}  // namespace tsr
