// Data-parallel training. A hook runs on a thread of the library, which it attaches; it calls Ddp.Relay.reduce, which
// lets nothing be thrown.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jclass relay_class = nullptr;
jmethodID relay_reduce = nullptr;

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
            failed =
                env->CallIntMethod(static_cast<jobject>(user_data), relay_reduce, static_cast<jint>(bucket->bucket),
                                   list, as_long(bucket->comm), as_long(bucket->stream));
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

}  // namespace

void load_ddp_classes(JNIEnv* env) {
    relay_class = global_class(env, "dev/tessera/Ddp$Relay");
    relay_reduce = instance_method(env, relay_class, "reduce", "(I[JJJ)I");
}

Methods ddp_methods() {
    return {method<ddp_param_name>("ddpParamName"), method<ddp_shared_param>("ddpSharedParam"),
            method<ddp_stats>("ddpStats"), method<ddp_set_hook>("ddpSetHook")};
}

}  // namespace tsr::jni
