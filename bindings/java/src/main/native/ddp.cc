// Data-parallel training.
#include "jni.hpp"

namespace tsr::jni {

namespace {

// Bits of `given`: 0 bucket_bytes, 1 first_bucket_bytes, 2 op.
jlong ddp_create(JNIEnv* env, jclass, jlong comm, jobjectArray names, jlongArray tensors, jint given,
                 jlong bucket_bytes, jlong first_bucket_bytes, jint op) {
    return shim(env, [&] {
        const Params params(env, names, tensors);
        tsr_ddp_options options;
        check(env, tsr_ddp_options_init(&options, sizeof options));
        set_if(given, 0, options.bucket_bytes, bucket_bytes);
        set_if(given, 1, options.first_bucket_bytes, first_bucket_bytes);
        set_if(given, 2, options.op, op);
        tsr_ddp* ddp = nullptr;
        blocking(env, [&] { return tsr_ddp_create(as<tsr_comm>(comm), params.data(), params.size(), &options, &ddp); });
        return as_long(ddp);
    });
}

jint ddp_param_count(JNIEnv* env, jclass, jlong ddp) {
    return shim(env, [&]() -> jint {
        size_t count = 0;
        check(env, tsr_ddp_param_count(as<tsr_ddp>(ddp), &count));
        return static_cast<jint>(count);
    });
}

jbyteArray ddp_param_name(JNIEnv* env, jclass, jlong ddp, jint index) {
    return shim(env, [&] {
        tsr_param param{};
        check(env, tsr_ddp_param(as<tsr_ddp>(ddp), static_cast<size_t>(index), &param));
        return bytes_of(env, param.name);
    });
}

jlongArray ddp_grad(JNIEnv* env, jclass, jlong ddp, jint index) {
    return shim(env, [&] {
        tsr_tensor grad{};
        check(env, tsr_ddp_grad(as<tsr_ddp>(ddp), static_cast<size_t>(index), &grad));
        return descriptor_of(env, grad);
    });
}

void ddp_ready(JNIEnv* env, jclass, jlong ddp, jint index) {
    shim(env, [&] { check(env, tsr_ddp_ready(as<tsr_ddp>(ddp), static_cast<size_t>(index))); });
}

void ddp_ready_all(JNIEnv* env, jclass, jlong ddp) {
    shim(env, [&] { check(env, tsr_ddp_ready_all(as<tsr_ddp>(ddp))); });
}

void ddp_wait(JNIEnv* env, jclass, jlong ddp) {
    shim(env, [&] { blocking(env, [&] { return tsr_ddp_wait(as<tsr_ddp>(ddp)); }); });
}

void ddp_zero_grad(JNIEnv* env, jclass, jlong ddp) {
    shim(env, [&] { check(env, tsr_ddp_zero_grad(as<tsr_ddp>(ddp))); });
}

void ddp_destroy(JNIEnv*, jclass, jlong ddp) { tsr_ddp_destroy(as<tsr_ddp>(ddp)); }

}  // namespace

Methods ddp_methods() {
    return {method<ddp_create>("ddpCreate"),
            method<ddp_param_count>("ddpParamCount"),
            method<ddp_param_name>("ddpParamName"),
            method<ddp_grad>("ddpGrad"),
            method<ddp_ready>("ddpReady"),
            method<ddp_ready_all>("ddpReadyAll"),
            method<ddp_wait>("ddpWait"),
            method<ddp_zero_grad>("ddpZeroGrad"),
            method<ddp_destroy>("ddpDestroy")};
}

}  // namespace tsr::jni
