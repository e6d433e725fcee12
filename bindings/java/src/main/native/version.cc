// Which library was loaded, and the numbers of the headers that these shims were compiled with.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jint header_abi_version(JNIEnv*, jclass) { return TSR_ABI_VERSION; }

// The code of the calling thread's last error (TSR_OK if none): the tests see that a shim leaves none behind.
jint last_error_code(JNIEnv*, jclass) { return tsr_error_code(tsr_error_last()); }

// The enumerations of the headers, so that a test can compare Java's with them.
jlongArray header_numbers(JNIEnv* env, jclass) {
    return shim(env, [&] {
        const int64_t numbers[] = {TSR_DTYPE_F16,
                                   TSR_DTYPE_BF16,
                                   TSR_DTYPE_F32,
                                   TSR_DTYPE_F64,
                                   TSR_DTYPE_I8,
                                   TSR_DTYPE_U8,
                                   TSR_DTYPE_I32,
                                   TSR_DTYPE_I64,
                                   TSR_DTYPE_I16,
                                   TSR_DTYPE_BOOL,
                                   TSR_DTYPE_U16,
                                   TSR_DTYPE_U32,
                                   TSR_DTYPE_U64,
                                   TSR_DTYPE_F8_E4M3,
                                   TSR_DTYPE_F8_E5M2,
                                   TSR_DTYPE_F8_E8M0,
                                   TSR_DTYPE_C64,
                                   TSR_DTYPE_C128,
                                   TSR_REDUCE_SUM,
                                   TSR_REDUCE_AVG,
                                   TSR_REDUCE_MIN,
                                   TSR_REDUCE_MAX,
                                   TSR_REDUCE_PROD,
                                   TSR_DEVICE_CPU,
                                   TSR_DEVICE_CUDA,
                                   TSR_LOG_DEBUG,
                                   TSR_LOG_INFO,
                                   TSR_LOG_WARNING,
                                   TSR_LOG_ERROR,
                                   TSR_LOG_OFF,
                                   TSR_PLACE_REPLICATE,
                                   TSR_PLACE_SHARD,
                                   TSR_NATIVE_NONE,
                                   TSR_NATIVE_ERRNO,
                                   TSR_NATIVE_CUDA,
                                   TSR_NATIVE_NCCL,
                                   TSR_NATIVE_USER,
                                   TSR_SCHEDULE_GPIPE,
                                   TSR_SCHEDULE_1F1B,
                                   TSR_SCHEDULE_LOOPED_BFS,
                                   TSR_SCHEDULE_INTERLEAVED_1F1B,
                                   TSR_SCHEDULE_INTERLEAVED_ZERO_BUBBLE,
                                   TSR_SCHEDULE_ZB_H2,
                                   TSR_SCHEDULE_ZBV,
                                   TSR_SCHEDULE_DUALPIPEV,
                                   TSR_STAGE_FORWARD,
                                   TSR_STAGE_BACKWARD,
                                   TSR_STAGE_BACKWARD_INPUT,
                                   TSR_STAGE_BACKWARD_WEIGHT,
                                   TSR_MAX_NDIM};
        return longs_of(env, numbers, std::size(numbers));
    });
}

}  // namespace

Methods version_methods() {
    return {method<header_abi_version>("headerAbiVersion"), method<last_error_code>("lastErrorCode"),
            method<header_numbers>("headerNumbers")};
}

}  // namespace tsr::jni
