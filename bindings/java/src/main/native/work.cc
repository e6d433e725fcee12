// Asynchronous work. The completion callback runs on a thread of the library, which it attaches; it calls
// Work.Completion.done(status) once and drops the global reference that kept the operation's memory alive.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jclass completion_class = nullptr;
jmethodID completion_done = nullptr;

void on_done(tsr_status status, void* user_data) {
    JNIEnv* env = attached_env();
    if (env == nullptr) return;
    // tsr_work_on_done may run this in the middle of a shim, never with an exception pending.
    env->CallVoidMethod(static_cast<jobject>(user_data), completion_done, static_cast<jint>(status));
    if (env->ExceptionCheck()) env->ExceptionClear();
}

void drop_completion(void* user_data) {
    JNIEnv* env = attached_env();
    if (env != nullptr) env->DeleteGlobalRef(static_cast<jobject>(user_data));
}

void work_on_done(JNIEnv* env, jclass, jlong work, jobject completion) {
    shim(env, [&] {
        const jobject global = env->NewGlobalRef(completion);
        if (global == nullptr) throw std::bad_alloc();
        const tsr_status status = tsr_work_on_done(as<tsr_work>(work), on_done, global, drop_completion);
        if (status != TSR_OK) env->DeleteGlobalRef(global);
        check(env, status);
    });
}

// Whether the work was done before `timeout_ms` passed; throws its error.
jboolean work_wait(JNIEnv* env, jclass, jlong work, jint timeout_ms) {
    return shim(env, [&]() -> jboolean {
        bool ready = true;
        blocking(env, [&] {
            const tsr_status status = tsr_work_wait(as<tsr_work>(work), timeout_ms);
            if (status != TSR_E_NOT_READY) return status;
            ready = false;
            return static_cast<tsr_status>(TSR_OK);
        });
        return ready;
    });
}

}  // namespace

void load_work_classes(JNIEnv* env) {
    completion_class = global_class(env, "dev/tessera/Work$Completion");
    completion_done = instance_method(env, completion_class, "done", "(I)V");
}

Methods work_methods() { return {method<work_on_done>("workOnDone"), method<work_wait>("workWait")}; }

}  // namespace tsr::jni
