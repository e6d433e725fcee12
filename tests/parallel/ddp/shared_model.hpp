// What the tests of one copy a host share (DdpOptions::share_params), between threads and between processes: a model, its
// optimizer, and all that the copy holds.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/model/state.hpp"
#include "optim/adagrad.hpp"
#include "optim/adam.hpp"
#include "optim/lion.hpp"
#include "optim/sgd.hpp"
#include "parallel/model.hpp"
#include "with_grads.hpp"

namespace tsr::testing {

using Bytes = std::vector<std::byte>;

// Parameters of any sizes, also fewer elements than ranks and none, of both types that optimizers update.
struct Params {
    struct Spec {
        std::string name;
        Dims shape;
        DType dtype = DType::f32;
    };
    std::vector<Spec> specs{
        {"embedding", {500, 33}},      {"bias", {33}}, {"scale", {}}, {"one", {1}}, {"two", {2}}, {"none", {0}},
        {"wide", {7, 101}, DType::f64}};
    std::vector<Bytes> memory;

    std::vector<NamedTensor> tensors() {
        std::vector<NamedTensor> out;
        memory.clear();
        for (const Spec& spec : specs) {
            Tensor tensor{nullptr, spec.shape, spec.dtype, {}};
            memory.emplace_back(tensor.size_bytes() + 1);
            tensor.data = memory.back().data();
            set(tensor, [&](size_t k) { return std::cos(0.3 * static_cast<double>(k)); });
            out.push_back({spec.name, tensor});
        }
        return out;
    }
    static void set(const Tensor& tensor, const std::function<double(size_t k)>& value) {
        for (size_t k = 0; k < static_cast<size_t>(tensor.numel()); ++k) {
            if (tensor.dtype == DType::f64) {
                tensor.as<double>()[k] = value(k);
            } else if (tensor.dtype == DType::f32) {  // what is of neither type is refused
                tensor.as<float>()[k] = static_cast<float>(value(k));
            }
        }
    }
};

enum class Kind { sgd, momentum, adam, adamw, adagrad, lion };

inline std::shared_ptr<Optimizer> make(Kind kind, Ddp& ddp) {
    const auto params = with_grads(ddp);
    std::shared_ptr<Optimizer> made;
    if (kind == Kind::sgd) {
        made = std::make_shared<Sgd>(params, SgdOptions{.lr = 0.1, .weight_decay = 0.01}, ddp.host_copy());
    } else if (kind == Kind::momentum) {
        made = std::make_shared<Sgd>(params, SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}, ddp.host_copy());
    } else if (kind == Kind::adagrad) {
        made = std::make_shared<Adagrad>(
            params, AdagradOptions{.lr = 0.1, .lr_decay = 0.1, .initial_accumulator_value = 0.5}, ddp.host_copy());
    } else if (kind == Kind::lion) {
        made = std::make_shared<Lion>(params, LionOptions{.lr = 0.01, .weight_decay = 0.1}, ddp.host_copy());
    } else {
        const auto decay = kind == Kind::adam ? Decay::in_gradient : Decay::decoupled;
        made = std::make_shared<Adam>(params, AdamOptions{.lr = 0.01, .weight_decay = 0.1, .decay = decay},
                                      ddp.host_copy());
    }
    if (ddp.host_copy()) ddp.step_in_backward(*made);
    return {made.get(), [made, &ddp](Optimizer* ending) mutable {
                ddp.forget_optimizer(*ending);
                made.reset();
            }};
}

inline DdpOptions small_buckets(bool share, DdpOptions options = {}) {
    options.bucket_bytes = 20000;
    options.first_bucket_bytes = 500;
    options.share_params = share;
    return options;
}

inline void append(Bytes& to, const Tensor& tensor) {
    to.insert(to.end(), tensor.data, tensor.data + tensor.size_bytes());
}

// Parameters and moments.
inline Bytes all_of(const Ddp& ddp, const Optimizer& optimizer) {
    Bytes all;
    for (const NamedTensor& param : ddp.params()) append(all, param.tensor);
    for (const Moment& moment : optimizer.moments()) append(all, moment.tensor);
    return all;
}

// What capi/state.cc makes of a model and its optimizer.
inline State state_of(const Ddp& ddp, const Optimizer& optimizer) {
    State state;
    const auto add = [&](const std::string& name, const Tensor& tensor) {
        if (ddp.host_copy()) {
            state.add_shared(name, tensor, ddp.host_copy());
        } else {
            state.add_tensor(name, tensor);
        }
    };
    for (const auto& [name, tensor] : ddp.params()) add("model." + name, tensor);
    for (const Moment& moment : optimizer.moments()) add("optim." + moment.param + "." + moment.name, moment.tensor);
    state.add_barrier(optimizer.barrier());
    return state;
}

}  // namespace tsr::testing
