// Plans: collectives that are prepared once and launched many times. The Java side keeps the tensors' memory.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jlong plan_create(JNIEnv* env, jclass, jlong comm, jint collective, jlongArray inputs, jlongArray outputs, jint op,
                  jint root) {
    return shim(env, [&] {
        const Tensors in(env, inputs), out(env, outputs);
        tsr_plan* plan = nullptr;
        check(env, tsr_plan_create(as<tsr_comm>(comm), collective, in.data(), in.size(), out.data(), out.size(), op,
                                   root, nullptr, &plan));
        return as_long(plan);
    });
}

void plan_run(JNIEnv* env, jclass, jlong plan) {
    shim(env, [&] { blocking(env, [&] { return tsr_plan_run(as<tsr_plan>(plan)); }); });
}

void plan_start(JNIEnv* env, jclass, jlong plan) {
    shim(env, [&] { check(env, tsr_plan_start(as<tsr_plan>(plan))); });
}

void plan_wait(JNIEnv* env, jclass, jlong plan, jint timeout_ms) {
    shim(env, [&] { blocking(env, [&] { return tsr_plan_wait(as<tsr_plan>(plan), timeout_ms); }); });
}

void plan_destroy(JNIEnv*, jclass, jlong plan) { tsr_plan_destroy(as<tsr_plan>(plan)); }

}  // namespace

Methods plan_methods() {
    return {method<plan_create>("planCreate"), method<plan_run>("planRun"), method<plan_start>("planStart"),
            method<plan_wait>("planWait"), method<plan_destroy>("planDestroy")};
}

}  // namespace tsr::jni
