// The distributed sampler.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jlongArray sampler_next(JNIEnv* env, jclass, jlong sampler, jint size) {
    return shim(env, [&] {
        std::vector<int64_t> indices(size > 0 ? static_cast<size_t>(size) : 0);
        size_t count = 0;
        check(env, tsr_sampler_next(as<tsr_sampler>(sampler), indices.data(), indices.size(), &count));
        return longs_of(env, indices.data(), count);
    });
}

// {epoch, consumed}
jlongArray sampler_position(JNIEnv* env, jclass, jlong sampler) {
    return shim(env, [&] {
        int64_t position[2] = {0, 0};
        check(env, tsr_sampler_position(as<tsr_sampler>(sampler), &position[0], &position[1]));
        return longs_of(env, position, 2);
    });
}

void sampler_valid(JNIEnv* env, jclass, jlong sampler, jlong address, jlong size) {
    shim(env, [&] {
        check(env, tsr_sampler_valid(as<tsr_sampler>(sampler), as<uint8_t>(address), static_cast<size_t>(size)));
    });
}

}  // namespace

Methods data_methods() {
    return {method<sampler_next>("samplerNext"), method<sampler_position>("samplerPosition"),
            method<sampler_valid>("samplerValid")};
}

}  // namespace tsr::jni
