#include "optim/sgd.hpp"

#include <array>

#include "base/error.hpp"
#include "optim/kernels.hpp"

namespace tsr {

namespace {

constexpr std::array<std::string_view, 1> moment_names{"momentum_buffer"};

std::span<const std::string_view> moments_of(const SgdOptions& options) {
    if (options.momentum == 0) return {};
    return moment_names;
}

void check(const SgdOptions& options) {
    check_not_negative("momentum", options.momentum);
    check_not_negative("dampening", options.dampening);
    check_not_negative("weight_decay", options.weight_decay);
    if (options.nesterov && (options.momentum <= 0 || options.dampening != 0)) {
        throw Error(Code::invalid_argument, "nesterov needs a momentum above 0 and a dampening of 0");
    }
}

template <class T>
SgdStep<T> prepared(const SgdOptions& options, double lr, int64_t step) {
    return {static_cast<T>(lr),
            static_cast<T>(options.momentum),
            static_cast<T>(1 - options.dampening),
            static_cast<T>(options.weight_decay),
            options.nesterov,
            step == 1};
}

}  // namespace

Sgd::Sgd(std::vector<OptimizerParam> params, const SgdOptions& options, std::shared_ptr<SharedCopy> copy)
    : Optimizer(std::move(params), options.lr, moments_of(options), std::move(copy)), options_(options) {
    check(options);
}

void Sgd::update(int64_t step, std::span<const ParamSlice> slices) {
    const auto in_float = prepared<float>(options_, lr(), step);
    const auto in_double = prepared<double>(options_, lr(), step);
    if (OnDevice* device = on_device()) [[unlikely]]
        return device->sgd(updated(slices), in_float, in_double);
    for (const ParamSlice& slice : slices) {
        before_write(slice.param);
        const auto run = [&]<class T>(const SgdStep<T>& prepared_step) {
            std::byte* buffer = options_.momentum != 0 ? moment_data(slice, 0) : nullptr;
            sgd_update(reinterpret_cast<T*>(value_data(slice)), reinterpret_cast<const T*>(slice.grad),
                       reinterpret_cast<T*>(buffer), slice.count, prepared_step);
        };
        if (params()[slice.param].value.dtype == DType::f32) {
            run(in_float);
        } else {
            run(in_double);
        }
    }
}

void Sgd::check_momentum() const {
    if (options_.momentum != 0) return;
    throw Error(Code::invalid_argument,
                "this SGD has no momentum that could change; create it with one, or a schedule without cycle_momentum");
}

Settings Sgd::own_settings() const {
    return {{"momentum", options_.momentum},
            {"dampening", options_.dampening},
            {"weight_decay", options_.weight_decay},
            {"nesterov", options_.nesterov}};
}

void Sgd::load_own_settings(const Settings& settings) {
    SgdOptions loaded = options_;
    loaded.momentum = setting<double>(settings, "momentum");
    loaded.dampening = setting<double>(settings, "dampening");
    loaded.weight_decay = setting<double>(settings, "weight_decay");
    loaded.nesterov = setting<bool>(settings, "nesterov");
    check(loaded);
    if ((loaded.momentum != 0) != (options_.momentum != 0)) {
        throw Error(Code::invalid_argument, "the saved SGD and this one must both have momentum or both have none");
    }
    options_ = loaded;
}

}  // namespace tsr
