// Savers, and committed checkpoints opened for reading.
#include "jni.hpp"

namespace tsr::jni {

namespace {

// Bits of `given`: 0 keep_latest, 1 timeout_ms. `comm` 0: one rank. The writer is always this binding.
jlong saver_create(JNIEnv* env, jclass, jlong comm, jbyteArray root, jint given, jint keep_latest, jint timeout_ms,
                   jbyteArray writer_version, jbyteArray format) {
    return shim(env, [&] {
        const Text path(env, root), version(env, writer_version), form(env, format);
        tsr_saver_options options;
        check(env, tsr_saver_options_init(&options, sizeof options));
        set_if(given, 0, options.keep_latest, keep_latest);
        set_if(given, 1, options.timeout_ms, timeout_ms);
        options.writer = "java";
        options.writer_version = version.c_str();
        options.format = form.c_str();
        tsr_saver* saver = nullptr;
        blocking(env, [&] { return tsr_saver_create(as<tsr_comm>(comm), path.c_str(), &options, &saver); });
        return as_long(saver);
    });
}

void saver_save(JNIEnv* env, jclass, jlong saver, jlong step, jlong state) {
    shim(env, [&] { blocking(env, [&] { return tsr_saver_save(as<tsr_saver>(saver), step, as<tsr_state>(state)); }); });
}

jlong saver_save_async(JNIEnv* env, jclass, jlong saver, jlong step, jlong state) {
    return shim(env, [&] {
        tsr_work* work = nullptr;
        blocking(env, [&] { return tsr_saver_save_async(as<tsr_saver>(saver), step, as<tsr_state>(state), &work); });
        return as_long(work);
    });
}

void saver_wait(JNIEnv* env, jclass, jlong saver) {
    shim(env, [&] { blocking(env, [&] { return tsr_saver_wait(as<tsr_saver>(saver)); }); });
}

jlong saver_resume(JNIEnv* env, jclass, jlong saver, jlong state) {
    return shim(env, [&]() -> jlong {
        int64_t step = 0;
        blocking(env, [&] { return tsr_saver_resume(as<tsr_saver>(saver), as<tsr_state>(state), &step); });
        return step;
    });
}

void saver_destroy(JNIEnv* env, jclass, jlong saver) {
    const Interruptible scope(env);
    tsr_saver_destroy(as<tsr_saver>(saver));
}

jlong checkpoint_open(JNIEnv* env, jclass, jbyteArray path) {
    return shim(env, [&] {
        const Text text(env, path);
        tsr_checkpoint* checkpoint = nullptr;
        blocking(env, [&] { return tsr_checkpoint_open(text.c_str(), &checkpoint); });
        return as_long(checkpoint);
    });
}

jbyteArray checkpoint_path(JNIEnv* env, jclass, jlong checkpoint) {
    return shim(env, [&] {
        return text_of(env, [&](char* text, size_t capacity, size_t* size) {
            return tsr_checkpoint_path(as<tsr_checkpoint>(checkpoint), text, capacity, size);
        });
    });
}

jbyteArray checkpoint_manifest(JNIEnv* env, jclass, jlong checkpoint) {
    return shim(env, [&] {
        return text_of(env, [&](char* text, size_t capacity, size_t* size) {
            return tsr_checkpoint_manifest(as<tsr_checkpoint>(checkpoint), text, capacity, size);
        });
    });
}

jlong checkpoint_step(JNIEnv* env, jclass, jlong checkpoint) {
    return shim(env, [&]() -> jlong {
        int64_t step = 0;
        check(env, tsr_checkpoint_step(as<tsr_checkpoint>(checkpoint), &step));
        return step;
    });
}

jlong checkpoint_tensor_count(JNIEnv* env, jclass, jlong checkpoint) {
    return shim(env, [&]() -> jlong {
        size_t count = 0;
        check(env, tsr_checkpoint_tensor_count(as<tsr_checkpoint>(checkpoint), &count));
        return static_cast<jlong>(count);
    });
}

jbyteArray checkpoint_tensor_name(JNIEnv* env, jclass, jlong checkpoint, jlong index) {
    return shim(env, [&] {
        const char* name = nullptr;
        tsr_dtype dtype = 0;
        const int64_t* shape = nullptr;
        int32_t ndim = 0;
        check(env, tsr_checkpoint_tensor(as<tsr_checkpoint>(checkpoint), static_cast<size_t>(index), &name, &dtype,
                                         &shape, &ndim));
        return bytes_of(env, name);
    });
}

// {dtype, sizes...}
jlongArray checkpoint_tensor_shape(JNIEnv* env, jclass, jlong checkpoint, jlong index) {
    return shim(env, [&] {
        const char* name = nullptr;
        tsr_dtype dtype = 0;
        const int64_t* shape = nullptr;
        int32_t ndim = 0;
        check(env, tsr_checkpoint_tensor(as<tsr_checkpoint>(checkpoint), static_cast<size_t>(index), &name, &dtype,
                                         &shape, &ndim));
        std::vector<int64_t> words{dtype};
        words.insert(words.end(), shape, shape + ndim);
        return longs_of(env, words.data(), words.size());
    });
}

void checkpoint_read(JNIEnv* env, jclass, jlong checkpoint, jbyteArray name, jlongArray tensor) {
    shim(env, [&] {
        const Text text(env, name);
        const Tensors one(env, tensor);
        blocking(env, [&] { return tsr_checkpoint_read(as<tsr_checkpoint>(checkpoint), text.c_str(), one.data()); });
    });
}

// Bits of `given`: 0 verify, 1 allow_missing, 2 allow_unexpected, 3 allow_cast; the same bits of `values`.
void checkpoint_load(JNIEnv* env, jclass, jlong checkpoint, jlong state, jint given, jint values) {
    shim(env, [&] {
        tsr_load_options options;
        check(env, tsr_load_options_init(&options, sizeof options));
        set_if(given, 0, options.verify, values & 1);
        set_if(given, 1, options.allow_missing, values >> 1 & 1);
        set_if(given, 2, options.allow_unexpected, values >> 2 & 1);
        set_if(given, 3, options.allow_cast, values >> 3 & 1);
        blocking(env,
                 [&] { return tsr_checkpoint_load(as<tsr_checkpoint>(checkpoint), as<tsr_state>(state), &options); });
    });
}

void checkpoint_verify(JNIEnv* env, jclass, jlong checkpoint, jboolean full) {
    shim(env,
         [&] { blocking(env, [&] { return tsr_checkpoint_verify(as<tsr_checkpoint>(checkpoint), full ? 1 : 0); }); });
}

// `comm` 0: this process alone. A timeout of 0 is the library's default.
void checkpoint_export(JNIEnv* env, jclass, jlong checkpoint, jlong comm, jbyteArray directory, jbyteArray format,
                       jlong max_file_bytes, jbyteArray under, jint timeout_ms) {
    shim(env, [&] {
        const Text path(env, directory), form(env, format), begin(env, under);
        tsr_export_options options;
        check(env, tsr_export_options_init(&options, sizeof options));
        options.format = form.c_str();
        options.max_file_bytes = max_file_bytes;
        options.under = begin.c_str();
        if (timeout_ms != 0) options.timeout_ms = timeout_ms;
        blocking(env, [&] {
            return tsr_checkpoint_export(as<tsr_checkpoint>(checkpoint), as<tsr_comm>(comm), path.c_str(), &options);
        });
    });
}

void checkpoint_destroy(JNIEnv*, jclass, jlong checkpoint) { tsr_checkpoint_destroy(as<tsr_checkpoint>(checkpoint)); }

}  // namespace

Methods checkpoint_methods() {
    return {method<saver_create>("saverCreate"),
            method<saver_save>("saverSave"),
            method<saver_save_async>("saverSaveAsync"),
            method<saver_wait>("saverWait"),
            method<saver_resume>("saverResume"),
            method<saver_destroy>("saverDestroy"),
            method<checkpoint_open>("checkpointOpen"),
            method<checkpoint_path>("checkpointPath"),
            method<checkpoint_manifest>("checkpointManifest"),
            method<checkpoint_step>("checkpointStep"),
            method<checkpoint_tensor_count>("checkpointTensorCount"),
            method<checkpoint_tensor_name>("checkpointTensorName"),
            method<checkpoint_tensor_shape>("checkpointTensorShape"),
            method<checkpoint_read>("checkpointRead"),
            method<checkpoint_load>("checkpointLoad"),
            method<checkpoint_verify>("checkpointVerify"),
            method<checkpoint_export>("checkpointExport"),
            method<checkpoint_destroy>("checkpointDestroy")};
}

}  // namespace tsr::jni
