// Tessera errors as Java exceptions: the whole chain of causes is copied into Java objects in the frame that failed.
#include <vector>

#include "jni.hpp"

namespace tsr::jni {

namespace {

jclass exception_class = nullptr;
jmethodID exception_factory = nullptr;

}  // namespace

void load_error_classes(JNIEnv* env) {
    exception_class = global_class(env, "dev/tessera/TesseraException");
    exception_factory = static_method(env, exception_class, "of",
                                      "(I[BII[BJIIZLdev/tessera/TesseraException;)Ldev/tessera/TesseraException;");
}

jobject exception_of(JNIEnv* env, const tsr_error* error) {
    std::vector<const tsr_error*> chain;
    for (; error != nullptr; error = tsr_error_cause(error)) chain.push_back(error);
    jobject exception = nullptr;  // from the innermost cause outwards
    for (auto it = chain.rbegin(); it != chain.rend(); ++it) {
        const jbyteArray message = bytes_of(env, tsr_error_message(*it));
        const jbyteArray operation = bytes_of(env, tsr_error_operation(*it));
        int32_t domain = TSR_NATIVE_NONE;
        const int32_t native = tsr_error_native(*it, &domain);
        const jobject outer = env->CallStaticObjectMethod(
            exception_class, exception_factory, static_cast<jint>(tsr_error_code(*it)), message,
            static_cast<jint>(tsr_error_rank(*it)), static_cast<jint>(tsr_error_peer(*it)), operation,
            static_cast<jlong>(tsr_error_sequence(*it)), static_cast<jint>(native), static_cast<jint>(domain),
            static_cast<jboolean>(tsr_error_retriable(*it) != 0), exception);
        check_pending(env);
        env->DeleteLocalRef(message);
        env->DeleteLocalRef(operation);
        if (exception != nullptr) env->DeleteLocalRef(exception);
        exception = outer;
    }
    return exception;
}

void throw_java(JNIEnv* env, const char* class_name, const char* message) noexcept {
    if (env->ExceptionCheck()) return;
    const jclass type = env->FindClass(class_name);
    if (type != nullptr) env->ThrowNew(type, message);
}

void throw_last_error(JNIEnv* env, tsr_status status) noexcept {
    try {
        // Taken, not borrowed: an upcall below could run code that fails in turn.
        tsr_error* error = nullptr;
        if (tsr_error_take(&error) != TSR_OK || error == nullptr) {
            throw_java(env, "java/lang/IllegalStateException", tsr_status_name(status));
            return;
        }
        jobject exception = nullptr;
        try {
            exception = exception_of(env, error);
        } catch (...) {
            tsr_error_destroy(error);
            throw;
        }
        tsr_error_destroy(error);
        env->Throw(static_cast<jthrowable>(exception));
    } catch (const Pending&) {
    } catch (...) {
        throw_java(env, "java/lang/OutOfMemoryError", "no memory for a Tessera error");
    }
}

}  // namespace tsr::jni
