// tessera/optim.h: optimizers over local parameters.
#include "tessera/optim.h"

#include "handles.hpp"
#include "optim/adagrad.hpp"
#include "optim/adam.hpp"
#include "optim/lamb.hpp"
#include "optim/lion.hpp"
#include "optim/optimizer.hpp"
#include "optim/sgd.hpp"
#include "train/optimizer_of.hpp"

namespace tsr::capi {

namespace {

constexpr tsr_sgd_options default_sgd{sizeof(tsr_sgd_options), 1e-3, 0, 0, 0, 0};
constexpr tsr_adam_options default_adam{sizeof(tsr_adam_options), 1e-3, 0.9, 0.999, 1e-8, 0};
constexpr tsr_adamw_options default_adamw{sizeof(tsr_adamw_options), 1e-3, 0.9, 0.999, 1e-8, 0.01};
constexpr tsr_adagrad_options default_adagrad{sizeof(tsr_adagrad_options), 1e-2, 0, 0, 0, 1e-10};
constexpr tsr_lion_options default_lion{sizeof(tsr_lion_options), 1e-4, 0.9, 0.99, 0};
constexpr tsr_lamb_options default_lamb{sizeof(tsr_lamb_options), 1e-3, 0.9, 0.999, 1e-8, 0, 10, 0.01, 1};

std::vector<OptimizerParam> params_in(const tsr_param* params, const tsr_tensor* grads, size_t n) {
    required(params, "params");
    required(grads, "grads");
    std::vector<OptimizerParam> out;
    out.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        const std::string name = name_in(params[i].name, "a parameter's name");
        const std::string what = fmt::format("parameter {} (\"{}\")", i, name);
        out.push_back({name, tensor_in(&params[i].tensor, what.c_str()),
                       tensor_in(&grads[i], ("the gradient of " + what).c_str())});
    }
    return out;
}

template <class Model, class Make>
void create_over(Model* model, const char* what, tsr_optimizer** out, Make&& make) {
    create(out, [&] { return optimizer_of(object_of(model, what), make); });
}

// One function per kind: creates an optimizer over `params` with the caller's options.
std::shared_ptr<Optimizer> sgd(std::vector<OptimizerParam> params, const tsr_sgd_options* options,
                               std::shared_ptr<SharedCopy> copy = {}) {
    const auto o = options_in(options, default_sgd, "options");
    const SgdOptions core{o.lr, o.momentum, o.dampening, o.weight_decay, flag(o.nesterov, "nesterov")};
    return std::make_shared<Sgd>(std::move(params), core, std::move(copy));
}

template <class Options>
std::shared_ptr<Optimizer> adam(std::vector<OptimizerParam> params, const Options* options, const Options& defaults,
                                Decay decay, std::shared_ptr<SharedCopy> copy = {}) {
    const auto o = options_in(options, defaults, "options");
    const AdamOptions core{o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, decay};
    return std::make_shared<Adam>(std::move(params), core, std::move(copy));
}

std::shared_ptr<Optimizer> adagrad(std::vector<OptimizerParam> params, const tsr_adagrad_options* options,
                                   std::shared_ptr<SharedCopy> copy = {}) {
    const auto o = options_in(options, default_adagrad, "options");
    const AdagradOptions core{o.lr, o.lr_decay, o.weight_decay, o.initial_accumulator_value, o.eps};
    return std::make_shared<Adagrad>(std::move(params), core, std::move(copy));
}

std::shared_ptr<Optimizer> lion(std::vector<OptimizerParam> params, const tsr_lion_options* options,
                                std::shared_ptr<SharedCopy> copy = {}) {
    const auto o = options_in(options, default_lion, "options");
    const LionOptions core{o.lr, o.beta1, o.beta2, o.weight_decay};
    return std::make_shared<Lion>(std::move(params), core, std::move(copy));
}

std::shared_ptr<Optimizer> lamb(std::vector<OptimizerParam> params, const tsr_lamb_options* options,
                                std::shared_ptr<SharedCopy> copy = {}) {
    const auto o = options_in(options, default_lamb, "options");
    const LambOptions core{o.lr,        o.beta1,        o.beta2,
                           o.eps,       o.weight_decay, flag(o.bias_correction, "bias_correction"),
                           o.max_coeff, o.min_coeff};
    return std::make_shared<Lamb>(std::move(params), core, std::move(copy));
}

}  // namespace

extern "C" {

tsr_status tsr_sgd_options_init(tsr_sgd_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_sgd, "options");
}

tsr_status tsr_adam_options_init(tsr_adam_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_adam, "options");
}

tsr_status tsr_adamw_options_init(tsr_adamw_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_adamw, "options");
}

tsr_status tsr_adagrad_options_init(tsr_adagrad_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_adagrad, "options");
}

tsr_status tsr_lion_options_init(tsr_lion_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_lion, "options");
}

tsr_status tsr_lamb_options_init(tsr_lamb_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_lamb, "options");
}

tsr_status tsr_sgd_create(const tsr_param* params, const tsr_tensor* grads, size_t n, const tsr_sgd_options* options,
                          tsr_optimizer** out) {
    return guard([&] { create(out, [&] { return sgd(params_in(params, grads, n), options); }); });
}

tsr_status tsr_ddp_sgd(tsr_ddp* ddp, const tsr_sgd_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(ddp, "ddp", out,
                    [&](auto params, auto copy) { return sgd(std::move(params), options, std::move(copy)); });
    });
}

tsr_status tsr_fsdp_sgd(tsr_fsdp* fsdp, const tsr_sgd_options* options, tsr_optimizer** out) {
    return guard(
        [&] { create_over(fsdp, "fsdp", out, [&](auto params, auto) { return sgd(std::move(params), options); }); });
}

tsr_status tsr_tp_sgd(tsr_tp* tp, const tsr_sgd_options* options, tsr_optimizer** out) {
    return guard(
        [&] { create_over(tp, "tp", out, [&](auto params, auto) { return sgd(std::move(params), options); }); });
}

tsr_status tsr_adam_create(const tsr_param* params, const tsr_tensor* grads, size_t n, const tsr_adam_options* options,
                           tsr_optimizer** out) {
    return guard([&] {
        create(out, [&] { return adam(params_in(params, grads, n), options, default_adam, Decay::in_gradient); });
    });
}

tsr_status tsr_ddp_adam(tsr_ddp* ddp, const tsr_adam_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(ddp, "ddp", out, [&](auto params, auto copy) {
            return adam(std::move(params), options, default_adam, Decay::in_gradient, std::move(copy));
        });
    });
}

tsr_status tsr_fsdp_adam(tsr_fsdp* fsdp, const tsr_adam_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(fsdp, "fsdp", out, [&](auto params, auto) {
            return adam(std::move(params), options, default_adam, Decay::in_gradient);
        });
    });
}

tsr_status tsr_tp_adam(tsr_tp* tp, const tsr_adam_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(tp, "tp", out, [&](auto params, auto) {
            return adam(std::move(params), options, default_adam, Decay::in_gradient);
        });
    });
}

tsr_status tsr_adamw_create(const tsr_param* params, const tsr_tensor* grads, size_t n,
                            const tsr_adamw_options* options, tsr_optimizer** out) {
    return guard([&] {
        create(out, [&] { return adam(params_in(params, grads, n), options, default_adamw, Decay::decoupled); });
    });
}

tsr_status tsr_ddp_adamw(tsr_ddp* ddp, const tsr_adamw_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(ddp, "ddp", out, [&](auto params, auto copy) {
            return adam(std::move(params), options, default_adamw, Decay::decoupled, std::move(copy));
        });
    });
}

tsr_status tsr_fsdp_adamw(tsr_fsdp* fsdp, const tsr_adamw_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(fsdp, "fsdp", out, [&](auto params, auto) {
            return adam(std::move(params), options, default_adamw, Decay::decoupled);
        });
    });
}

tsr_status tsr_tp_adamw(tsr_tp* tp, const tsr_adamw_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(tp, "tp", out, [&](auto params, auto) {
            return adam(std::move(params), options, default_adamw, Decay::decoupled);
        });
    });
}

tsr_status tsr_adagrad_create(const tsr_param* params, const tsr_tensor* grads, size_t n,
                              const tsr_adagrad_options* options, tsr_optimizer** out) {
    return guard([&] { create(out, [&] { return adagrad(params_in(params, grads, n), options); }); });
}

tsr_status tsr_ddp_adagrad(tsr_ddp* ddp, const tsr_adagrad_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(ddp, "ddp", out,
                    [&](auto params, auto copy) { return adagrad(std::move(params), options, std::move(copy)); });
    });
}

tsr_status tsr_fsdp_adagrad(tsr_fsdp* fsdp, const tsr_adagrad_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(fsdp, "fsdp", out, [&](auto params, auto) { return adagrad(std::move(params), options); });
    });
}

tsr_status tsr_tp_adagrad(tsr_tp* tp, const tsr_adagrad_options* options, tsr_optimizer** out) {
    return guard(
        [&] { create_over(tp, "tp", out, [&](auto params, auto) { return adagrad(std::move(params), options); }); });
}

tsr_status tsr_lion_create(const tsr_param* params, const tsr_tensor* grads, size_t n, const tsr_lion_options* options,
                           tsr_optimizer** out) {
    return guard([&] { create(out, [&] { return lion(params_in(params, grads, n), options); }); });
}

tsr_status tsr_ddp_lion(tsr_ddp* ddp, const tsr_lion_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(ddp, "ddp", out,
                    [&](auto params, auto copy) { return lion(std::move(params), options, std::move(copy)); });
    });
}

tsr_status tsr_fsdp_lion(tsr_fsdp* fsdp, const tsr_lion_options* options, tsr_optimizer** out) {
    return guard(
        [&] { create_over(fsdp, "fsdp", out, [&](auto params, auto) { return lion(std::move(params), options); }); });
}

tsr_status tsr_tp_lion(tsr_tp* tp, const tsr_lion_options* options, tsr_optimizer** out) {
    return guard(
        [&] { create_over(tp, "tp", out, [&](auto params, auto) { return lion(std::move(params), options); }); });
}

tsr_status tsr_lamb_create(const tsr_param* params, const tsr_tensor* grads, size_t n, const tsr_lamb_options* options,
                           tsr_optimizer** out) {
    return guard([&] { create(out, [&] { return lamb(params_in(params, grads, n), options); }); });
}

tsr_status tsr_ddp_lamb(tsr_ddp* ddp, const tsr_lamb_options* options, tsr_optimizer** out) {
    return guard([&] {
        create_over(ddp, "ddp", out,
                    [&](auto params, auto copy) { return lamb(std::move(params), options, std::move(copy)); });
    });
}

tsr_status tsr_fsdp_lamb(tsr_fsdp* fsdp, const tsr_lamb_options* options, tsr_optimizer** out) {
    return guard(
        [&] { create_over(fsdp, "fsdp", out, [&](auto params, auto) { return lamb(std::move(params), options); }); });
}

tsr_status tsr_tp_lamb(tsr_tp* tp, const tsr_lamb_options* options, tsr_optimizer** out) {
    return guard(
        [&] { create_over(tp, "tp", out, [&](auto params, auto) { return lamb(std::move(params), options); }); });
}

tsr_status tsr_optimizer_step(tsr_optimizer* optimizer) {
    return guard([&] { object_of(optimizer, "optimizer")->step(); });
}

tsr_status tsr_optimizer_zero_grad(tsr_optimizer* optimizer) {
    return guard([&] { object_of(optimizer, "optimizer")->zero_grad(); });
}

tsr_status tsr_optimizer_join(tsr_optimizer* optimizer, tsr_comm* comm) {
    return guard([&] {
        Optimizer& to = *object_of(optimizer, "optimizer");
        join_optimizers(to, object_of(comm, "comm"));
    });
}

tsr_status tsr_optimizer_clip_grad_norm(tsr_optimizer* optimizer, double max_norm, double p, double* norm) {
    return guard([&] {
        const double found = object_of(optimizer, "optimizer")->clip_grad_norm(max_norm, p);
        if (norm != nullptr) *norm = found;
    });
}

tsr_status tsr_optimizer_clip_grad_value(tsr_optimizer* optimizer, double most) {
    return guard([&] { object_of(optimizer, "optimizer")->clip_grad_value(most); });
}

tsr_status tsr_optimizer_set_stream(tsr_optimizer* optimizer, void* stream) {
    return guard([&] { object_of(optimizer, "optimizer")->set_stream(stream); });
}

tsr_status tsr_optimizer_lr(const tsr_optimizer* optimizer, double* lr) {
    return guard([&] { required(lr, "lr") = object_of(optimizer, "optimizer")->lr(); });
}

tsr_status tsr_optimizer_set_lr(tsr_optimizer* optimizer, double lr) {
    return guard([&] { object_of(optimizer, "optimizer")->set_lr(lr); });
}

tsr_status tsr_optimizer_steps(const tsr_optimizer* optimizer, int64_t* steps) {
    return guard([&] { required(steps, "steps") = object_of(optimizer, "optimizer")->steps(); });
}

void tsr_optimizer_destroy(tsr_optimizer* optimizer) {
    // A state may keep the object alive, but its memory belongs to the caller again, and a save may still have to copy
    // it.
    if (optimizer != nullptr && optimizer->magic == tsr_optimizer::type_magic) {
        optimizer->object->barrier()->before_write_all();
    }
    destroy(optimizer);
}

}  // extern "C"

}  // namespace tsr::capi
