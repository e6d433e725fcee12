// How callbacks that return a status call Java, whose methods let nothing be thrown: dev.tessera.Failures.
#pragma once

#include "jni.hpp"

namespace tsr::jni {

inline constexpr int32_t failed = -1;
inline constexpr jint frame_references = 16;

inline int32_t says(char* message, const char* text) {
    size_t i = 0;
    for (; text[i] != '\0' && i + 1 < TSR_MESSAGE_BYTES; ++i) message[i] = text[i];
    message[i] = '\0';
    return failed;
}

// Runs `body(env)` with room for its local references. Whatever goes wrong between C and Java is a status.
template <class Body>
int32_t upcall(char* message, Body&& body) noexcept {
    JNIEnv* env = attached_env();
    if (env == nullptr) return says(message, "the JVM is ending");
    if (env->ExceptionCheck()) return says(message, "a Java exception is pending on this thread");
    if (env->PushLocalFrame(frame_references) != 0) {
        env->ExceptionClear();
        return says(message, "no memory in the JVM");
    }
    int32_t status = failed;
    try {
        status = body(env);
    } catch (...) {
        says(message, "no memory in the JVM");
    }
    if (env->ExceptionCheck()) {  // the method catches; what is left is lack of memory
        env->ExceptionClear();
        status = says(message, "no memory in the JVM");
    }
    env->PopLocalFrame(nullptr);
    return status;
}

inline jobject buffer_of(JNIEnv* env, const void* data, int64_t size) {
    if (size == 0) return nullptr;
    const jobject buffer = env->NewDirectByteBuffer(const_cast<void*>(data), size);
    check_pending(env);
    return buffer;
}

inline jobject message_of(JNIEnv* env, char* message) { return buffer_of(env, message, TSR_MESSAGE_BYTES); }

}  // namespace tsr::jni
