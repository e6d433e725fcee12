// A Java object as the library's storage: each callback is one static method of dev.tessera.StorageCalls, which lets
// nothing be thrown. Callbacks come from any thread; those of the library are attached.
#include <array>

#include "upcall.hpp"

namespace tsr::jni {

namespace {

jclass calls_class = nullptr;
jclass object_class = nullptr;
jmethodID call_status, call_open, call_read, call_put, call_begin, call_part, call_finish, call_end, call_list,
    call_remove;

jobjectArray slot_of(JNIEnv* env) {
    const jobjectArray made = env->NewObjectArray(1, object_class, nullptr);
    check_pending(env);
    return made;
}

jlongArray numbers_of(JNIEnv* env) {
    const std::array<int64_t, 3> zeros{};
    return longs_of(env, zeros.data(), zeros.size());
}

std::vector<int64_t> numbers(JNIEnv* env, jlongArray array) { return longs(env, array); }

jobject in_slot(JNIEnv* env, jobjectArray made) {
    const jobject object = env->GetObjectArrayElement(made, 0);
    check_pending(env);
    return object;
}

// The object in the slot, kept for C.
void* global_of(JNIEnv* env, jobjectArray made) {
    const jobject global = env->NewGlobalRef(in_slot(env, made));
    if (global == nullptr) throw std::bad_alloc();
    return global;
}

jobject of(void* reference) { return static_cast<jobject>(reference); }

int32_t on_status(const char* key, int32_t* kind, int64_t* size, int64_t* modified_ms, char* message, void* storage) {
    return upcall(message, [&](JNIEnv* env) {
        const jlongArray out = numbers_of(env);
        const jint status = env->CallStaticIntMethod(calls_class, call_status, of(storage), bytes_of(env, key), out,
                                                     message_of(env, message));
        check_pending(env);
        const auto told = numbers(env, out);
        *kind = static_cast<int32_t>(told[0]);
        *size = told[1];
        *modified_ms = told[2];
        return status;
    });
}

int32_t on_open(const char* key, void** object, int64_t* size, char* message, void* storage) {
    return upcall(message, [&](JNIEnv* env) {
        const jlongArray out = numbers_of(env);
        const jobjectArray made = slot_of(env);
        const jint status = env->CallStaticIntMethod(calls_class, call_open, of(storage), bytes_of(env, key), made, out,
                                                     message_of(env, message));
        check_pending(env);
        if (status != TSR_OK) return status;
        *size = numbers(env, out)[0];
        *object = global_of(env, made);
        return status;
    });
}

int32_t on_read(void* object, int64_t offset, void* data, int64_t size, int64_t* got, char* message, void*) {
    return upcall(message, [&](JNIEnv* env) {
        const jlongArray out = numbers_of(env);
        const jint status = env->CallStaticIntMethod(calls_class, call_read, of(object), static_cast<jlong>(offset),
                                                     buffer_of(env, data, size), out, message_of(env, message));
        check_pending(env);
        *got = numbers(env, out)[0];
        return status;
    });
}

int32_t on_put(const char* key, const void* data, int64_t size, int32_t if_absent, char* message, void* storage) {
    return upcall(message, [&](JNIEnv* env) {
        const jint status =
            env->CallStaticIntMethod(calls_class, call_put, of(storage), bytes_of(env, key), buffer_of(env, data, size),
                                     static_cast<jboolean>(if_absent != 0), message_of(env, message));
        check_pending(env);
        return status;
    });
}

int32_t on_begin(const char* key, int64_t size, void** upload, char* message, void* storage) {
    return upcall(message, [&](JNIEnv* env) {
        const jobjectArray made = slot_of(env);
        const jint status = env->CallStaticIntMethod(calls_class, call_begin, of(storage), bytes_of(env, key),
                                                     static_cast<jlong>(size), made, message_of(env, message));
        check_pending(env);
        if (status == TSR_OK) *upload = global_of(env, made);
        return status;
    });
}

int32_t on_part(void* upload, int64_t index, int64_t offset, const void* data, int64_t size, char* message, void*) {
    return upcall(message, [&](JNIEnv* env) {
        const jint status =
            env->CallStaticIntMethod(calls_class, call_part, of(upload), static_cast<jlong>(index),
                                     static_cast<jlong>(offset), buffer_of(env, data, size), message_of(env, message));
        check_pending(env);
        return status;
    });
}

int32_t on_finish(void* upload, char* message, void*) {
    return upcall(message, [&](JNIEnv* env) {
        const jint status = env->CallStaticIntMethod(calls_class, call_finish, of(upload), message_of(env, message));
        check_pending(env);
        return status;
    });
}

void on_end(void* object, void*) {
    std::array<char, TSR_MESSAGE_BYTES> nowhere{};
    (void)upcall(nowhere.data(), [&](JNIEnv* env) -> int32_t {
        env->CallStaticVoidMethod(calls_class, call_end, of(object));
        env->DeleteGlobalRef(of(object));
        return TSR_OK;
    });
}

int32_t on_list(const char* key, tsr_storage_found_fn found, void* found_data, char* message, void* storage) {
    return upcall(message, [&](JNIEnv* env) {
        const jobjectArray made = slot_of(env);
        const jint status = env->CallStaticIntMethod(calls_class, call_list, of(storage), bytes_of(env, key), made,
                                                     message_of(env, message));
        check_pending(env);
        if (status != TSR_OK) return status;
        for (const Text& name : texts(env, static_cast<jobjectArray>(in_slot(env, made)))) {
            found(name.c_str(), found_data);
        }
        return status;
    });
}

int32_t removed(const char* key, bool directory, char* message, void* storage) {
    return upcall(message, [&](JNIEnv* env) {
        const jint status = env->CallStaticIntMethod(calls_class, call_remove, of(storage), bytes_of(env, key),
                                                     static_cast<jboolean>(directory), message_of(env, message));
        check_pending(env);
        return status;
    });
}

int32_t on_remove(const char* key, char* message, void* storage) { return removed(key, false, message, storage); }

int32_t on_remove_directory(const char* key, char* message, void* storage) {
    return removed(key, true, message, storage);
}

void on_destroy(void* storage) {
    JNIEnv* env = attached_env();
    if (env != nullptr) env->DeleteGlobalRef(of(storage));
}

jlong storage_create(JNIEnv* env, jclass, jobject storage, jint capabilities, jlong part_bytes) {
    return shim(env, [&] {
        tsr_storage_vtable table{};
        table.struct_size = sizeof table;
        table.capabilities = capabilities;
        table.part_bytes = part_bytes;
        table.status = on_status;
        table.open = on_open;
        table.read = on_read;
        table.close = on_end;
        table.put = on_put;
        table.begin = on_begin;
        table.part = on_part;
        table.finish = on_finish;
        table.drop = on_end;
        table.list = on_list;
        table.remove = on_remove;
        table.remove_directory = on_remove_directory;
        const jobject global = env->NewGlobalRef(storage);
        if (global == nullptr) throw std::bad_alloc();
        tsr_storage* made = nullptr;
        const tsr_status status = tsr_storage_create(&table, global, on_destroy, &made);
        if (status != TSR_OK) env->DeleteGlobalRef(global);
        check(env, status);
        return as_long(made);
    });
}

}  // namespace

void load_storage_classes(JNIEnv* env) {
    calls_class = global_class(env, "dev/tessera/StorageCalls");
    object_class = global_class(env, "java/lang/Object");
    const auto method_of = [&](const char* name, const char* signature) {
        return static_method(env, calls_class, name, signature);
    };
    call_status = method_of("status", "(Ljava/lang/Object;[B[JLjava/nio/ByteBuffer;)I");
    call_open = method_of("open", "(Ljava/lang/Object;[B[Ljava/lang/Object;[JLjava/nio/ByteBuffer;)I");
    call_read = method_of("read", "(Ljava/lang/Object;JLjava/nio/ByteBuffer;[JLjava/nio/ByteBuffer;)I");
    call_put = method_of("put", "(Ljava/lang/Object;[BLjava/nio/ByteBuffer;ZLjava/nio/ByteBuffer;)I");
    call_begin = method_of("begin", "(Ljava/lang/Object;[BJ[Ljava/lang/Object;Ljava/nio/ByteBuffer;)I");
    call_part = method_of("part", "(Ljava/lang/Object;JJLjava/nio/ByteBuffer;Ljava/nio/ByteBuffer;)I");
    call_finish = method_of("finish", "(Ljava/lang/Object;Ljava/nio/ByteBuffer;)I");
    call_end = method_of("end", "(Ljava/lang/Object;)V");
    call_list = method_of("list", "(Ljava/lang/Object;[B[Ljava/lang/Object;Ljava/nio/ByteBuffer;)I");
    call_remove = method_of("remove", "(Ljava/lang/Object;[BZLjava/nio/ByteBuffer;)I");
}

Methods storage_methods() { return {method<storage_create>("storageCreate")}; }

}  // namespace tsr::jni
