// The log as a Java callback, and thread interruption as the library's interrupt callback.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jclass log_class = nullptr;
jmethodID log_line = nullptr;
jclass thread_class = nullptr;
jmethodID current_thread = nullptr;
jmethodID is_interrupted = nullptr;

// Polled by blocking calls on the thread that blocks, so `user_data` is that thread's own environment.
int32_t poll_interrupted(void* user_data) {
    auto* env = static_cast<JNIEnv*>(user_data);
    if (env->ExceptionCheck()) return 1;
    const jobject thread = env->CallStaticObjectMethod(thread_class, current_thread);
    if (env->ExceptionCheck() || thread == nullptr) {
        env->ExceptionClear();
        return 0;
    }
    const jboolean interrupted = env->CallBooleanMethod(thread, is_interrupted);
    if (env->ExceptionCheck()) env->ExceptionClear();
    env->DeleteLocalRef(thread);
    return interrupted ? 1 : 0;
}

void on_line(int32_t level, const char* line, void* user_data) {
    JNIEnv* env = attached_env();
    if (env == nullptr || env->ExceptionCheck()) return;
    try {
        const jbyteArray bytes = bytes_of(env, line);
        env->CallStaticVoidMethod(log_class, log_line, static_cast<jobject>(user_data), static_cast<jint>(level),
                                  bytes);
        env->DeleteLocalRef(bytes);
    } catch (...) {
    }
    if (env->ExceptionCheck()) env->ExceptionClear();  // Log.line catches; what is left is lack of memory
}

void drop_handler(void* user_data) {
    JNIEnv* env = attached_env();
    if (env != nullptr) env->DeleteGlobalRef(static_cast<jobject>(user_data));
}

void log_set_handler(JNIEnv* env, jclass, jobject handler) {
    shim(env, [&] {
        if (handler == nullptr) return check(env, tsr_log_set_callback(nullptr, nullptr, nullptr));
        const jobject global = env->NewGlobalRef(handler);
        if (global == nullptr) throw std::bad_alloc();
        check(env, tsr_log_set_callback(on_line, global, drop_handler));
    });
}

}  // namespace

Interruptible::Interruptible(JNIEnv* env) { (void)!tsr_interrupt_set(poll_interrupted, env); }
Interruptible::~Interruptible() { (void)!tsr_interrupt_set(nullptr, nullptr); }

void load_interrupt_classes(JNIEnv* env) {
    thread_class = global_class(env, "java/lang/Thread");
    current_thread = static_method(env, thread_class, "currentThread", "()Ljava/lang/Thread;");
    is_interrupted = instance_method(env, thread_class, "isInterrupted", "()Z");
}

void load_log_classes(JNIEnv* env) {
    log_class = global_class(env, "dev/tessera/Log");
    log_line = static_method(env, log_class, "line", "(Ljava/lang/Object;I[B)V");
}

Methods log_methods() { return {method<log_set_handler>("logSetHandler")}; }

}  // namespace tsr::jni
