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

// `comm` 0: one rank; `progress` 0: none; `storage` 0: a directory. The writer is always this binding.
jlong saver_create(JNIEnv* env, jclass, jlong comm, jbyteArray root, jobject settings, jbyteArray writer_version,
                   jlong progress, jlong storage) {
    return shim(env, [&] {
        const Text path(env, root), version(env, writer_version);
        tsr_saver_options options = *options_of<tsr_saver_options>(env, settings);
        options.writer = "java";
        options.writer_version = version.c_str();
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

void keep_report(const char* json, void* user_data) {
    try {
        *static_cast<std::string*>(user_data) = json;
    } catch (const std::bad_alloc&) {
        // It stays empty.
    }
}

// `comm` 0: this rank loads for itself. `only` null: all names; `rules`: a saved name, what it is here, and so on. Returns
// the report.
jbyteArray checkpoint_load(JNIEnv* env, jclass, jlong checkpoint, jlong state, jobject settings, jobject progress,
                           jlong comm, jobjectArray only, jobjectArray rules) {
    return shim(env, [&] {
        tsr_load_options options = *options_of<tsr_load_options>(env, settings);
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

void checkpoint_verify_progress(JNIEnv* env, jclass, jlong checkpoint, jboolean full, jobject progress) {
    shim(env, [&] {
        blocking(env, [&] {
            return tsr_checkpoint_verify_progress(as<tsr_checkpoint>(checkpoint), full ? 1 : 0, on_progress, progress);
        });
    });
}

// `comm` 0: this process alone.
void checkpoint_export(JNIEnv* env, jclass, jlong checkpoint, jlong comm, jbyteArray directory, jobject settings,
                       jobject progress) {
    shim(env, [&] {
        const Text path(env, directory);
        tsr_export_options options = *options_of<tsr_export_options>(env, settings);
        if (progress != nullptr) {
            options.progress = on_progress;
            options.progress_data = progress;
        }
        blocking(env, [&] {
            return tsr_checkpoint_export(as<tsr_checkpoint>(checkpoint), as<tsr_comm>(comm), path.c_str(), &options);
        });
    });
}

}  // namespace

void load_checkpoint_classes(JNIEnv* env) {
    relay_update = instance_method(env, global_class(env, "dev/tessera/ProgressRelay"), "update", "(IJJ)V");
}

Methods checkpoint_methods() {
    return {method<saver_create>("saverCreate"),
            method<checkpoint_open_with>("checkpointOpenWith"),
            method<checkpoint_tensor_name>("checkpointTensorName"),
            method<checkpoint_tensor_shape>("checkpointTensorShape"),
            method<checkpoint_load>("checkpointLoad"),
            method<checkpoint_export>("checkpointExport"),
            method<checkpoint_verify_progress>("checkpointVerifyProgress"),
            method<progress_keep>("progressKeep"),
            method<progress_drop>("progressDrop")};
}

}  // namespace tsr::jni
