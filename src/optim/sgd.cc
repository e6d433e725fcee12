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

Sgd::Sgd(std::vector<OptimizerParam> params, const SgdOptions& options)
    : Optimizer(std::move(params), options.lr, moments_of(options)), options_(options) {
    check(options);
}

void Sgd::update(int64_t step) {
    const auto in_float = prepared<float>(options_, lr(), step);
    const auto in_double = prepared<double>(options_, lr(), step);
    for (size_t p = 0; p < params().size(); ++p) {
        before_write(p);
        const auto& [name, value, grad] = params()[p];
        std::byte* buffer = options_.momentum != 0 ? moment_data(p, 0) : nullptr;
        const auto n = static_cast<size_t>(value.numel());
        if (value.dtype == DType::f32) {
            sgd_update(value.as<float>().data(), grad.as<float>().data(), reinterpret_cast<float*>(buffer), n,
                       in_float);
        } else {
            sgd_update(value.as<double>().data(), grad.as<double>().data(), reinterpret_cast<double*>(buffer), n,
                       in_double);
        }
    }
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
        throw Error(Code::invalid_argument, "one of the saved and this SGD has momentum, the other has none");
    }
    options_ = loaded;
}

}  // namespace tsr
