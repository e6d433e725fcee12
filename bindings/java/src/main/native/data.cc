// The distributed sampler.
#include "jni.hpp"

namespace tsr::jni {

namespace {

// Bits of `given`: 0 seed, 1 shuffle, 2 drop_last.
jlong sampler_create(JNIEnv* env, jclass, jlong comm, jlong length, jint given, jlong seed, jboolean shuffle,
                     jboolean drop_last) {
    return shim(env, [&] {
        tsr_sampler_options options;
        check(env, tsr_sampler_options_init(&options, sizeof options));
        set_if(given, 0, options.seed, seed);
        set_if(given, 1, options.shuffle, shuffle);
        set_if(given, 2, options.drop_last, drop_last);
        tsr_sampler* sampler = nullptr;
        check(env, tsr_sampler_create(as<tsr_comm>(comm), length, &options, &sampler));
        return as_long(sampler);
    });
}

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

void sampler_set_epoch(JNIEnv* env, jclass, jlong sampler, jlong epoch) {
    shim(env, [&] { check(env, tsr_sampler_set_epoch(as<tsr_sampler>(sampler), epoch)); });
}

void sampler_destroy(JNIEnv*, jclass, jlong sampler) { tsr_sampler_destroy(as<tsr_sampler>(sampler)); }

}  // namespace

Methods data_methods() {
    return {method<sampler_create>("samplerCreate"), method<sampler_next>("samplerNext"),
            method<sampler_position>("samplerPosition"), method<sampler_set_epoch>("samplerSetEpoch"),
            method<sampler_destroy>("samplerDestroy")};
}

}  // namespace tsr::jni
