// Buffers of a communicator, direct byte buffers, and the addresses behind them.
#include "jni.hpp"

namespace tsr::jni {

namespace {

// {address, bytes}
jlongArray buffer_data(JNIEnv* env, jclass, jlong buffer) {
    return shim(env, [&] {
        void* data = nullptr;
        size_t size = 0;
        check(env, tsr_buffer_data(as<tsr_buffer>(buffer), &data, &size));
        const int64_t words[] = {as_long(data), static_cast<int64_t>(size)};
        return longs_of(env, words, 2);
    });
}

// The address of a direct buffer's first element; 0 if it is none.
jlong direct_address(JNIEnv* env, jclass, jobject buffer) { return as_long(env->GetDirectBufferAddress(buffer)); }

jobject direct_buffer(JNIEnv* env, jclass, jlong address, jlong size) {
    return env->NewDirectByteBuffer(as<void>(address), size);
}

}  // namespace

Methods memory_methods() {
    return {method<buffer_data>("bufferData"), method<direct_address>("directAddress"),
            method<direct_buffer>("directBuffer")};
}

}  // namespace tsr::jni
