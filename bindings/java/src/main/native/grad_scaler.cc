// Dynamic scaling of losses.
#include "jni.hpp"

namespace tsr::jni {

namespace {

// Bits of `given`: 0 init_scale, 1 growth_factor, and so on in the order of the arguments.
jlong grad_scaler_create(JNIEnv* env, jclass, jint given, jdouble init_scale, jdouble growth_factor,
                         jdouble backoff_factor, jlong growth_interval) {
    return shim(env, [&] {
        tsr_grad_scaler_options options;
        check(env, tsr_grad_scaler_options_init(&options, sizeof options));
        set_if(given, 0, options.init_scale, init_scale);
        set_if(given, 1, options.growth_factor, growth_factor);
        set_if(given, 2, options.backoff_factor, backoff_factor);
        set_if(given, 3, options.growth_interval, growth_interval);
        tsr_grad_scaler* scaler = nullptr;
        check(env, tsr_grad_scaler_create(&options, &scaler));
        return as_long(scaler);
    });
}

jdouble grad_scaler_scale(JNIEnv* env, jclass, jlong scaler) {
    return shim(env, [&]() -> jdouble {
        double scale = 0;
        check(env, tsr_grad_scaler_scale(as<tsr_grad_scaler>(scaler), &scale));
        return scale;
    });
}

void grad_scaler_unscale(JNIEnv* env, jclass, jlong scaler, jlong optimizer) {
    shim(env, [&] {
        blocking(env,
                 [&] { return tsr_grad_scaler_unscale(as<tsr_grad_scaler>(scaler), as<tsr_optimizer>(optimizer)); });
    });
}

jboolean grad_scaler_step(JNIEnv* env, jclass, jlong scaler, jlong optimizer) {
    return shim(env, [&]() -> jboolean {
        int32_t stepped = 0;
        blocking(env, [&] {
            return tsr_grad_scaler_step(as<tsr_grad_scaler>(scaler), as<tsr_optimizer>(optimizer), &stepped);
        });
        return stepped != 0 ? JNI_TRUE : JNI_FALSE;
    });
}

void grad_scaler_update(JNIEnv* env, jclass, jlong scaler) {
    shim(env, [&] { check(env, tsr_grad_scaler_update(as<tsr_grad_scaler>(scaler))); });
}

void grad_scaler_destroy(JNIEnv*, jclass, jlong scaler) { tsr_grad_scaler_destroy(as<tsr_grad_scaler>(scaler)); }

}  // namespace

Methods grad_scaler_methods() {
    return {method<grad_scaler_create>("gradScalerCreate"),   method<grad_scaler_scale>("gradScalerScale"),
            method<grad_scaler_unscale>("gradScalerUnscale"), method<grad_scaler_step>("gradScalerStep"),
            method<grad_scaler_update>("gradScalerUpdate"),   method<grad_scaler_destroy>("gradScalerDestroy")};
}

}  // namespace tsr::jni
