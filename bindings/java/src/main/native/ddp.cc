// Data-parallel training. A hook runs on a thread of the library, which it attaches; it calls Ddp.Relay.reduce, which
// lets nothing be thrown.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jclass relay_class = nullptr;
jmethodID relay_reduce = nullptr;

jlong ddp_shared_step(JNIEnv* env, jclass, jlong ddp) {
    return shim(env, [&]() -> jlong {
        int64_t steps = 0;
        check(env, tsr_ddp_shared_step(as<tsr_ddp>(ddp), &steps));
        return steps;
    });
}

// Bits of `given`: 0 bucket_bytes, 1 first_bucket_bytes, 2 op, and so on in the order of the arguments.
jlong ddp_create(JNIEnv* env, jclass, jlong comm, jobjectArray names, jlongArray tensors, jint given,
                 jlong bucket_bytes, jlong first_bucket_bytes, jint op, jdouble pre_divide, jboolean find_unused,
                 jboolean static_graph, jboolean rebuild_buckets, jint reduce_dtype, jint hook, jint powersgd_rank,
                 jint powersgd_start_step, jint join, jboolean share_params) {
    return shim(env, [&] {
        const Params params(env, names, tensors);
        tsr_ddp_options options;
        check(env, tsr_ddp_options_init(&options, sizeof options));
        set_if(given, 0, options.bucket_bytes, bucket_bytes);
        set_if(given, 1, options.first_bucket_bytes, first_bucket_bytes);
        set_if(given, 2, options.op, op);
        set_if(given, 3, options.pre_divide, pre_divide);
        set_if(given, 4, options.find_unused, find_unused);
        set_if(given, 5, options.static_graph, static_graph);
        set_if(given, 6, options.rebuild_buckets, rebuild_buckets);
        set_if(given, 7, options.reduce_dtype, reduce_dtype);
        set_if(given, 8, options.hook, hook);
        set_if(given, 9, options.powersgd_rank, powersgd_rank);
        set_if(given, 10, options.powersgd_start_step, powersgd_start_step);
        set_if(given, 11, options.join, join);
        set_if(given, 12, options.share_params, share_params);
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

jlongArray ddp_shared_param(JNIEnv* env, jclass, jlong ddp, jint index) {
    return shim(env, [&] {
        tsr_param param{};
        check(env, tsr_ddp_param(as<tsr_ddp>(ddp), static_cast<size_t>(index), &param));
        return descriptor_of(env, param.tensor);
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

void ddp_set_sync(JNIEnv* env, jclass, jlong ddp, jboolean sync) {
    shim(env, [&] { check(env, tsr_ddp_set_sync(as<tsr_ddp>(ddp), sync ? 1 : 0)); });
}

jboolean ddp_used(JNIEnv* env, jclass, jlong ddp, jint index) {
    return shim(env, [&]() -> jboolean {
        int32_t used = 0;
        check(env, tsr_ddp_used(as<tsr_ddp>(ddp), static_cast<size_t>(index), &used));
        return used != 0;
    });
}

jint ddp_bucket_count(JNIEnv* env, jclass, jlong ddp) {
    return shim(env, [&]() -> jint {
        size_t count = 0;
        check(env, tsr_ddp_bucket_count(as<tsr_ddp>(ddp), &count));
        return static_cast<jint>(count);
    });
}

// The fields of tsr_bucket_stats in their order.
jlongArray ddp_stats(JNIEnv* env, jclass, jlong ddp, jint bucket) {
    return shim(env, [&] {
        tsr_bucket_stats stats{};
        stats.struct_size = sizeof stats;
        check(env, tsr_ddp_stats(as<tsr_ddp>(ddp), static_cast<size_t>(bucket), &stats));
        const int64_t values[] = {static_cast<int64_t>(stats.size_bytes),
                                  static_cast<int64_t>(stats.params),
                                  stats.ready_ns,
                                  stats.start_ns,
                                  stats.end_ns,
                                  stats.exposed_ns};
        return longs_of(env, values, std::size(values));
    });
}

int32_t on_bucket(const tsr_ddp_bucket* bucket, void* user_data) {
    JNIEnv* env = attached_env();
    if (env == nullptr) return 1;
    int32_t failed = 1;
    // A thread of the library has no Java frame that would free the list.
    if (env->PushLocalFrame(4) == 0) {
        try {
            const std::vector<int64_t> params(bucket->params, bucket->params + bucket->n);
            const jlongArray list = longs_of(env, params.data(), params.size());
            failed = env->CallIntMethod(static_cast<jobject>(user_data), relay_reduce,
                                        static_cast<jint>(bucket->bucket), list, as_long(bucket->comm));
        } catch (...) {
            failed = 1;
        }
        if (env->ExceptionCheck()) failed = 1;
        env->ExceptionClear();
        env->PopLocalFrame(nullptr);
    }
    env->ExceptionClear();
    return failed;
}

void drop_relay(void* user_data) {
    JNIEnv* env = attached_env();
    if (env != nullptr) env->DeleteGlobalRef(static_cast<jobject>(user_data));
}

// A null relay: what the options say.
void ddp_set_hook(JNIEnv* env, jclass, jlong ddp, jobject relay) {
    shim(env, [&] {
        if (relay == nullptr) return check(env, tsr_ddp_set_hook(as<tsr_ddp>(ddp), nullptr, nullptr, nullptr));
        const jobject global = env->NewGlobalRef(relay);
        if (global == nullptr) throw std::bad_alloc();
        const tsr_status status = tsr_ddp_set_hook(as<tsr_ddp>(ddp), on_bucket, global, drop_relay);
        if (status != TSR_OK) env->DeleteGlobalRef(global);
        check(env, status);
    });
}

void ddp_step_in_backward(JNIEnv* env, jclass, jlong ddp, jlong optimizer) {
    shim(env, [&] { check(env, tsr_ddp_step_in_backward(as<tsr_ddp>(ddp), as<tsr_optimizer>(optimizer))); });
}

void ddp_register_buffers(JNIEnv* env, jclass, jlong ddp, jobjectArray names, jlongArray tensors) {
    shim(env, [&] {
        const Params buffers(env, names, tensors);
        blocking(env, [&] { return tsr_ddp_register_buffers(as<tsr_ddp>(ddp), buffers.data(), buffers.size()); });
    });
}

void ddp_broadcast_buffers(JNIEnv* env, jclass, jlong ddp) {
    shim(env, [&] { blocking(env, [&] { return tsr_ddp_broadcast_buffers(as<tsr_ddp>(ddp)); }); });
}

void ddp_join(JNIEnv* env, jclass, jlong ddp, jboolean sync_params) {
    shim(env, [&] { blocking(env, [&] { return tsr_ddp_join(as<tsr_ddp>(ddp), sync_params ? 1 : 0); }); });
}

void ddp_zero_grad(JNIEnv* env, jclass, jlong ddp) {
    shim(env, [&] { check(env, tsr_ddp_zero_grad(as<tsr_ddp>(ddp))); });
}

void ddp_destroy(JNIEnv*, jclass, jlong ddp) { tsr_ddp_destroy(as<tsr_ddp>(ddp)); }

}  // namespace

void load_ddp_classes(JNIEnv* env) {
    relay_class = global_class(env, "dev/tessera/Ddp$Relay");
    relay_reduce = instance_method(env, relay_class, "reduce", "(I[JJ)I");
}

Methods ddp_methods() {
    return {method<ddp_create>("ddpCreate"),
            method<ddp_param_count>("ddpParamCount"),
            method<ddp_param_name>("ddpParamName"),
            method<ddp_shared_param>("ddpSharedParam"),
            method<ddp_grad>("ddpGrad"),
            method<ddp_ready>("ddpReady"),
            method<ddp_ready_all>("ddpReadyAll"),
            method<ddp_wait>("ddpWait"),
            method<ddp_set_sync>("ddpSetSync"),
            method<ddp_used>("ddpUsed"),
            method<ddp_bucket_count>("ddpBucketCount"),
            method<ddp_stats>("ddpStats"),
            method<ddp_set_hook>("ddpSetHook"),
            method<ddp_step_in_backward>("ddpStepInBackward"),
            method<ddp_register_buffers>("ddpRegisterBuffers"),
            method<ddp_broadcast_buffers>("ddpBroadcastBuffers"),
            method<ddp_join>("ddpJoin"),
            method<ddp_shared_step>("ddpSharedStep"),
            method<ddp_zero_grad>("ddpZeroGrad"),
            method<ddp_destroy>("ddpDestroy")};
}

}  // namespace tsr::jni
