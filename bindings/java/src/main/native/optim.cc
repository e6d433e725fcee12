// Optimizers. Each algorithm has three shims, over a DDP object, an FSDP object, or parameters and gradients; all take
// the bits of the options that were set and their values.
#include <stdexcept>

#include "jni.hpp"

namespace tsr::jni {

namespace {

// Bits: 0 lr, 1 momentum, 2 dampening, 3 weight_decay, 4 nesterov.
tsr_sgd_options sgd_options(JNIEnv* env, jint given, jdouble lr, jdouble momentum, jdouble dampening,
                            jdouble weight_decay, jboolean nesterov) {
    tsr_sgd_options options;
    check(env, tsr_sgd_options_init(&options, sizeof options));
    set_if(given, 0, options.lr, lr);
    set_if(given, 1, options.momentum, momentum);
    set_if(given, 2, options.dampening, dampening);
    set_if(given, 3, options.weight_decay, weight_decay);
    set_if(given, 4, options.nesterov, nesterov);
    return options;
}

// Bits of Adam and AdamW: 0 lr, 1 beta1, 2 beta2, 3 eps, 4 weight_decay.
template <class Options>
Options adam_options(JNIEnv* env, tsr_status (*init)(Options*, size_t), jint given, jdouble lr, jdouble beta1,
                     jdouble beta2, jdouble eps, jdouble weight_decay) {
    Options options;
    check(env, init(&options, sizeof options));
    set_if(given, 0, options.lr, lr);
    set_if(given, 1, options.beta1, beta1);
    set_if(given, 2, options.beta2, beta2);
    set_if(given, 3, options.eps, eps);
    set_if(given, 4, options.weight_decay, weight_decay);
    return options;
}

template <class Model, class Options>
jlong over_model(JNIEnv* env, tsr_status (*create)(Model*, const Options*, tsr_optimizer**), jlong model,
                 const Options& options) {
    tsr_optimizer* optimizer = nullptr;
    check(env, create(as<Model>(model), &options, &optimizer));
    return as_long(optimizer);
}

template <class Options>
jlong over_params(JNIEnv* env,
                  tsr_status (*create)(const tsr_param*, const tsr_tensor*, size_t, const Options*, tsr_optimizer**),
                  jobjectArray names, jlongArray tensors, jlongArray grads, const Options& options) {
    const Params params(env, names, tensors);
    const Tensors gradients(env, grads);
    if (gradients.size() != params.size()) throw std::logic_error("one gradient a parameter");
    tsr_optimizer* optimizer = nullptr;
    check(env, create(params.data(), gradients.data(), params.size(), &options, &optimizer));
    return as_long(optimizer);
}

jlong ddp_sgd(JNIEnv* env, jclass, jlong ddp, jint given, jdouble lr, jdouble momentum, jdouble dampening,
              jdouble weight_decay, jboolean nesterov) {
    return shim(env, [&] {
        return over_model(env, tsr_ddp_sgd, ddp,
                          sgd_options(env, given, lr, momentum, dampening, weight_decay, nesterov));
    });
}

jlong fsdp_sgd(JNIEnv* env, jclass, jlong fsdp, jint given, jdouble lr, jdouble momentum, jdouble dampening,
               jdouble weight_decay, jboolean nesterov) {
    return shim(env, [&] {
        return over_model(env, tsr_fsdp_sgd, fsdp,
                          sgd_options(env, given, lr, momentum, dampening, weight_decay, nesterov));
    });
}

jlong sgd_create(JNIEnv* env, jclass, jobjectArray names, jlongArray tensors, jlongArray grads, jint given, jdouble lr,
                 jdouble momentum, jdouble dampening, jdouble weight_decay, jboolean nesterov) {
    return shim(env, [&] {
        return over_params(env, tsr_sgd_create, names, tensors, grads,
                           sgd_options(env, given, lr, momentum, dampening, weight_decay, nesterov));
    });
}

jlong ddp_adam(JNIEnv* env, jclass, jlong ddp, jint given, jdouble lr, jdouble beta1, jdouble beta2, jdouble eps,
               jdouble weight_decay) {
    return shim(env, [&] {
        return over_model(env, tsr_ddp_adam, ddp,
                          adam_options(env, tsr_adam_options_init, given, lr, beta1, beta2, eps, weight_decay));
    });
}

jlong fsdp_adam(JNIEnv* env, jclass, jlong fsdp, jint given, jdouble lr, jdouble beta1, jdouble beta2, jdouble eps,
                jdouble weight_decay) {
    return shim(env, [&] {
        return over_model(env, tsr_fsdp_adam, fsdp,
                          adam_options(env, tsr_adam_options_init, given, lr, beta1, beta2, eps, weight_decay));
    });
}

jlong adam_create(JNIEnv* env, jclass, jobjectArray names, jlongArray tensors, jlongArray grads, jint given, jdouble lr,
                  jdouble beta1, jdouble beta2, jdouble eps, jdouble weight_decay) {
    return shim(env, [&] {
        return over_params(env, tsr_adam_create, names, tensors, grads,
                           adam_options(env, tsr_adam_options_init, given, lr, beta1, beta2, eps, weight_decay));
    });
}

jlong ddp_adamw(JNIEnv* env, jclass, jlong ddp, jint given, jdouble lr, jdouble beta1, jdouble beta2, jdouble eps,
                jdouble weight_decay) {
    return shim(env, [&] {
        return over_model(env, tsr_ddp_adamw, ddp,
                          adam_options(env, tsr_adamw_options_init, given, lr, beta1, beta2, eps, weight_decay));
    });
}

jlong fsdp_adamw(JNIEnv* env, jclass, jlong fsdp, jint given, jdouble lr, jdouble beta1, jdouble beta2, jdouble eps,
                 jdouble weight_decay) {
    return shim(env, [&] {
        return over_model(env, tsr_fsdp_adamw, fsdp,
                          adam_options(env, tsr_adamw_options_init, given, lr, beta1, beta2, eps, weight_decay));
    });
}

jlong adamw_create(JNIEnv* env, jclass, jobjectArray names, jlongArray tensors, jlongArray grads, jint given,
                   jdouble lr, jdouble beta1, jdouble beta2, jdouble eps, jdouble weight_decay) {
    return shim(env, [&] {
        return over_params(env, tsr_adamw_create, names, tensors, grads,
                           adam_options(env, tsr_adamw_options_init, given, lr, beta1, beta2, eps, weight_decay));
    });
}

void optimizer_step(JNIEnv* env, jclass, jlong optimizer) {
    shim(env, [&] { check(env, tsr_optimizer_step(as<tsr_optimizer>(optimizer))); });
}

void optimizer_zero_grad(JNIEnv* env, jclass, jlong optimizer) {
    shim(env, [&] { check(env, tsr_optimizer_zero_grad(as<tsr_optimizer>(optimizer))); });
}

jdouble optimizer_clip_grad_norm(JNIEnv* env, jclass, jlong optimizer, jdouble max_norm, jdouble p) {
    return shim(env, [&]() -> jdouble {
        double norm = 0;
        blocking(env, [&] { return tsr_optimizer_clip_grad_norm(as<tsr_optimizer>(optimizer), max_norm, p, &norm); });
        return norm;
    });
}

void optimizer_clip_grad_value(JNIEnv* env, jclass, jlong optimizer, jdouble most) {
    shim(env, [&] { check(env, tsr_optimizer_clip_grad_value(as<tsr_optimizer>(optimizer), most)); });
}

jdouble optimizer_lr(JNIEnv* env, jclass, jlong optimizer) {
    return shim(env, [&]() -> jdouble {
        double lr = 0;
        check(env, tsr_optimizer_lr(as<tsr_optimizer>(optimizer), &lr));
        return lr;
    });
}

void optimizer_set_lr(JNIEnv* env, jclass, jlong optimizer, jdouble lr) {
    shim(env, [&] { check(env, tsr_optimizer_set_lr(as<tsr_optimizer>(optimizer), lr)); });
}

jlong optimizer_steps(JNIEnv* env, jclass, jlong optimizer) {
    return shim(env, [&]() -> jlong {
        int64_t steps = 0;
        check(env, tsr_optimizer_steps(as<tsr_optimizer>(optimizer), &steps));
        return steps;
    });
}

void optimizer_destroy(JNIEnv*, jclass, jlong optimizer) { tsr_optimizer_destroy(as<tsr_optimizer>(optimizer)); }

}  // namespace

Methods optim_methods() {
    return {method<ddp_sgd>("ddpSgd"),
            method<fsdp_sgd>("fsdpSgd"),
            method<sgd_create>("sgdCreate"),
            method<ddp_adam>("ddpAdam"),
            method<fsdp_adam>("fsdpAdam"),
            method<adam_create>("adamCreate"),
            method<ddp_adamw>("ddpAdamw"),
            method<fsdp_adamw>("fsdpAdamw"),
            method<adamw_create>("adamwCreate"),
            method<optimizer_step>("optimizerStep"),
            method<optimizer_zero_grad>("optimizerZeroGrad"),
            method<optimizer_clip_grad_norm>("optimizerClipGradNorm"),
            method<optimizer_clip_grad_value>("optimizerClipGradValue"),
            method<optimizer_lr>("optimizerLr"),
            method<optimizer_set_lr>("optimizerSetLr"),
            method<optimizer_steps>("optimizerSteps"),
            method<optimizer_destroy>("optimizerDestroy")};
}

}  // namespace tsr::jni
