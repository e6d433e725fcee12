// Savers, and committed checkpoints opened for reading.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jmethodID relay_update = nullptr;

// On the thread of the call, or on the saver's own.
void on_progress(int32_t phase, int64_t done, int64_t total, void* user_data) {
    JNIEnv* env = attached_env();
    if (env == nullptr || env->ExceptionCheck()) return;
    env->CallVoidMethod(static_cast<jobject>(user_data), relay_update, static_cast<jint>(phase),
                        static_cast<jlong>(done), static_cast<jlong>(total));
    if (env->ExceptionCheck()) env->ExceptionClear();  // ProgressRelay.update catches; what is left is lack of memory
}

// A saver's ProgressRelay outlives the call that gave it: kept before the saver is created, dropped after its destroy.
jlong progress_keep(JNIEnv* env, jclass, jobject relay) {
    return shim(env, [&]() -> jlong {
        if (relay == nullptr) return 0;
        const jobject kept = env->NewGlobalRef(relay);
        if (kept == nullptr) throw std::bad_alloc();
        return as_long(kept);
    });
}

void progress_drop(JNIEnv* env, jclass, jlong kept) {
    if (kept != 0) env->DeleteGlobalRef(reinterpret_cast<jobject>(static_cast<uintptr_t>(kept)));
}

// Bits of `given` and fields of `numbers`: 0 keep_latest, 1 timeout_ms, 2 best_is_higher, 3 keep_best, 4 keep_every,
// 5 when_busy, 6 low_priority, 7 staging_bytes, 8 write_bytes_per_s, 9 copy_on_demand, 10 check_replicas. `comm` 0: one
// rank; `progress` 0: none; `storage` 0: a directory. The writer is always this binding.
jlong saver_create(JNIEnv* env, jclass, jlong comm, jbyteArray root, jint given, jlongArray numbers,
                   jbyteArray writer_version, jbyteArray format, jbyteArray best_metric, jlong progress,
                   jlong storage) {
    return shim(env, [&] {
        const Text path(env, root), version(env, writer_version), form(env, format), metric(env, best_metric);
        const std::vector<int64_t> fields = longs(env, numbers);
        tsr_saver_options options;
        check(env, tsr_saver_options_init(&options, sizeof options));
        set_if(given, 0, options.keep_latest, fields.at(0));
        set_if(given, 1, options.timeout_ms, fields.at(1));
        set_if(given, 2, options.best_is_higher, fields.at(2));
        set_if(given, 3, options.keep_best, fields.at(3));
        set_if(given, 4, options.keep_every, fields.at(4));
        set_if(given, 5, options.when_busy, fields.at(5));
        set_if(given, 6, options.low_priority, fields.at(6));
        set_if(given, 7, options.staging_bytes, fields.at(7));
        set_if(given, 8, options.write_bytes_per_s, fields.at(8));
        set_if(given, 9, options.copy_on_demand, fields.at(9));
        set_if(given, 10, options.check_replicas, fields.at(10));
        options.writer = "java";
        options.writer_version = version.c_str();
        options.format = form.c_str();
        options.best_metric = metric.c_str();
        if (progress != 0) {
            options.progress = on_progress;
            options.progress_data = reinterpret_cast<void*>(static_cast<uintptr_t>(progress));
        }
        options.storage = as<tsr_storage>(storage);
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

jboolean saver_should_stop(JNIEnv* env, jclass, jlong saver, jlong step, jboolean told) {
    return shim(env, [&]() -> jboolean {
        int32_t stop = 0;
        blocking(env, [&] { return tsr_saver_should_stop(as<tsr_saver>(saver), step, told ? 1 : 0, &stop); });
        return stop != 0;
    });
}

void saver_trim(JNIEnv* env, jclass, jlong saver) {
    shim(env, [&] { check(env, tsr_saver_trim(as<tsr_saver>(saver))); });
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

jlong checkpoint_open_with(JNIEnv* env, jclass, jbyteArray path, jlong storage) {
    return shim(env, [&] {
        const Text text(env, path);
        tsr_open_options options;
        check(env, tsr_open_options_init(&options, sizeof options));
        options.storage = as<tsr_storage>(storage);
        tsr_checkpoint* checkpoint = nullptr;
        blocking(env, [&] { return tsr_checkpoint_open_with(text.c_str(), &options, &checkpoint); });
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

void keep_report(const char* json, void* user_data) {
    try {
        *static_cast<std::string*>(user_data) = json;
    } catch (const std::bad_alloc&) {
        // It stays empty.
    }
}

// Bits of `given`: 0 verify, 1 allow_missing, 2 allow_unexpected, 3 allow_cast; the same bits of `values`. `comm` 0: this
// rank loads for itself. `only` null: all names; `rules`: a saved name, what it is here, and so on. Returns the report.
jbyteArray checkpoint_load(JNIEnv* env, jclass, jlong checkpoint, jlong state, jint given, jint values,
                           jobject progress, jlong comm, jobjectArray only, jobjectArray rules) {
    return shim(env, [&] {
        tsr_load_options options;
        check(env, tsr_load_options_init(&options, sizeof options));
        set_if(given, 0, options.verify, values & 1);
        set_if(given, 1, options.allow_missing, values >> 1 & 1);
        set_if(given, 2, options.allow_unexpected, values >> 2 & 1);
        set_if(given, 3, options.allow_cast, values >> 3 & 1);
        if (progress != nullptr) {
            options.progress = on_progress;
            options.progress_data = progress;
        }
        if (comm != 0) options.comm = as<tsr_comm>(comm);
        std::vector<Text> patterns;
        if (only != nullptr) patterns = texts(env, only);
        std::vector<const char*> pointers;
        for (const Text& pattern : patterns) pointers.push_back(pattern.c_str());
        pointers.push_back(nullptr);  // so that it has an address without any, which is refused
        if (only != nullptr) options.only = pointers.data();
        options.only_count = patterns.size();
        const std::vector<Text> names = texts(env, rules);
        std::vector<tsr_name_rule> pairs;
        for (size_t i = 0; i + 1 < names.size(); i += 2) pairs.push_back({names[i].c_str(), names[i + 1].c_str()});
        options.rules = pairs.data();
        options.rule_count = pairs.size();
        std::string report;
        options.report = keep_report;
        options.report_data = &report;
        blocking(env,
                 [&] { return tsr_checkpoint_load(as<tsr_checkpoint>(checkpoint), as<tsr_state>(state), &options); });
        if (report.empty()) throw std::bad_alloc();
        return bytes_of(env, report.data(), report.size());
    });
}

void checkpoint_verify(JNIEnv* env, jclass, jlong checkpoint, jboolean full) {
    shim(env,
         [&] { blocking(env, [&] { return tsr_checkpoint_verify(as<tsr_checkpoint>(checkpoint), full ? 1 : 0); }); });
}

void checkpoint_verify_progress(JNIEnv* env, jclass, jlong checkpoint, jboolean full, jobject progress) {
    shim(env, [&] {
        blocking(env, [&] {
            return tsr_checkpoint_verify_progress(as<tsr_checkpoint>(checkpoint), full ? 1 : 0, on_progress, progress);
        });
    });
}

// `comm` 0: this process alone. A timeout of 0 is the library's default.
void checkpoint_export(JNIEnv* env, jclass, jlong checkpoint, jlong comm, jbyteArray directory, jbyteArray format,
                       jlong max_file_bytes, jbyteArray under, jint timeout_ms, jobject progress) {
    shim(env, [&] {
        const Text path(env, directory), form(env, format), begin(env, under);
        tsr_export_options options;
        check(env, tsr_export_options_init(&options, sizeof options));
        options.format = form.c_str();
        options.max_file_bytes = max_file_bytes;
        options.under = begin.c_str();
        if (timeout_ms != 0) options.timeout_ms = timeout_ms;
        if (progress != nullptr) {
            options.progress = on_progress;
            options.progress_data = progress;
        }
        blocking(env, [&] {
            return tsr_checkpoint_export(as<tsr_checkpoint>(checkpoint), as<tsr_comm>(comm), path.c_str(), &options);
        });
    });
}

void checkpoint_destroy(JNIEnv*, jclass, jlong checkpoint) { tsr_checkpoint_destroy(as<tsr_checkpoint>(checkpoint)); }

}  // namespace

void load_checkpoint_classes(JNIEnv* env) {
    relay_update = instance_method(env, global_class(env, "dev/tessera/ProgressRelay"), "update", "(IJJ)V");
}

Methods checkpoint_methods() {
    return {method<saver_create>("saverCreate"),
            method<saver_save>("saverSave"),
            method<saver_save_async>("saverSaveAsync"),
            method<saver_wait>("saverWait"),
            method<saver_resume>("saverResume"),
            method<saver_should_stop>("saverShouldStop"),
            method<saver_trim>("saverTrim"),
            method<saver_destroy>("saverDestroy"),
            method<checkpoint_open>("checkpointOpen"),
            method<checkpoint_open_with>("checkpointOpenWith"),
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
            method<checkpoint_verify_progress>("checkpointVerifyProgress"),
            method<checkpoint_destroy>("checkpointDestroy"),
            method<progress_keep>("progressKeep"),
            method<progress_drop>("progressDrop")};
}

}  // namespace tsr::jni
