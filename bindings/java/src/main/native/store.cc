// The key-value store and its server.
#include "jni.hpp"

namespace tsr::jni {

namespace {

// Bits of `given`: 0 timeout_ms, 1 insecure, 2 epoch; the texts are NULL where they were not set.
struct Options {
    Text token, job_id;
    tsr_store_options value;

    Options(JNIEnv* env, jint given, jint timeout_ms, jboolean insecure, jlong epoch, jbyteArray token_bytes,
            jbyteArray job_bytes)
        : token(env, token_bytes), job_id(env, job_bytes) {
        check(env, tsr_store_options_init(&value, sizeof value));
        set_if(given, 0, value.timeout_ms, timeout_ms);
        set_if(given, 1, value.insecure, insecure);
        set_if(given, 2, value.epoch, epoch);
        if (token_bytes != nullptr) value.token = token.c_str();
        if (job_bytes != nullptr) value.job_id = job_id.c_str();
    }
};

jlong store_open(JNIEnv* env, jclass, jbyteArray uri, jint given, jint timeout_ms, jboolean insecure, jlong epoch,
                 jbyteArray token, jbyteArray job_id) {
    return shim(env, [&] {
        const Options options(env, given, timeout_ms, insecure, epoch, token, job_id);
        const Text text(env, uri);
        tsr_store* store = nullptr;
        blocking(env, [&] { return tsr_store_open(text.c_str(), &options.value, &store); });
        return as_long(store);
    });
}

jlong store_serve(JNIEnv* env, jclass, jbyteArray host, jint port, jint given, jint timeout_ms, jboolean insecure,
                  jlong epoch, jbyteArray token, jbyteArray job_id) {
    return shim(env, [&] {
        const Options options(env, given, timeout_ms, insecure, epoch, token, job_id);
        tsr_store_server* server = nullptr;
        check(env, tsr_store_serve(Text(env, host).c_str(), static_cast<uint16_t>(port), &options.value, &server));
        return as_long(server);
    });
}

jint store_server_port(JNIEnv* env, jclass, jlong server) {
    return shim(env, [&]() -> jint {
        uint16_t port = 0;
        check(env, tsr_store_server_port(as<tsr_store_server>(server), &port));
        return port;
    });
}

void store_server_destroy(JNIEnv*, jclass, jlong server) { tsr_store_server_destroy(as<tsr_store_server>(server)); }
void store_destroy(JNIEnv*, jclass, jlong store) { tsr_store_destroy(as<tsr_store>(store)); }

void store_set(JNIEnv* env, jclass, jlong store, jbyteArray key, jbyteArray value) {
    shim(env, [&] {
        const Text name(env, key), bytes(env, value);
        blocking(env, [&] { return tsr_store_set(as<tsr_store>(store), name.c_str(), bytes.data(), bytes.size()); });
    });
}

jbyteArray store_get(JNIEnv* env, jclass, jlong store, jbyteArray key) {
    return shim(env, [&] {
        const Text name(env, key);
        std::string buffer(256, '\0');
        for (;;) {  // the value may grow between two reads
            size_t size = 0;
            blocking(env, [&] {
                return tsr_store_get(as<tsr_store>(store), name.c_str(), buffer.data(), buffer.size(), &size);
            });
            if (size <= buffer.size()) return bytes_of(env, buffer.data(), size);
            buffer.resize(size);
        }
    });
}

void store_wait(JNIEnv* env, jclass, jlong store, jbyteArray key, jint timeout_ms) {
    shim(env, [&] {
        const Text name(env, key);
        blocking(env, [&] { return tsr_store_wait(as<tsr_store>(store), name.c_str(), timeout_ms); });
    });
}

jlong store_add(JNIEnv* env, jclass, jlong store, jbyteArray key, jlong delta) {
    return shim(env, [&]() -> jlong {
        const Text name(env, key);
        int64_t result = 0;
        blocking(env, [&] { return tsr_store_add(as<tsr_store>(store), name.c_str(), delta, &result); });
        return result;
    });
}

jboolean store_compare_set(JNIEnv* env, jclass, jlong store, jbyteArray key, jbyteArray expected, jbyteArray desired) {
    return shim(env, [&]() -> jboolean {
        const Text name(env, key), from(env, expected), to(env, desired);
        int32_t swapped = 0;
        blocking(env, [&] {
            return tsr_store_compare_set(as<tsr_store>(store), name.c_str(), from.data(), from.size(), to.data(),
                                         to.size(), &swapped);
        });
        return swapped != 0;
    });
}

jboolean store_delete(JNIEnv* env, jclass, jlong store, jbyteArray key) {
    return shim(env, [&]() -> jboolean {
        const Text name(env, key);
        int32_t existed = 0;
        blocking(env, [&] { return tsr_store_delete(as<tsr_store>(store), name.c_str(), &existed); });
        return existed != 0;
    });
}

}  // namespace

Methods store_methods() {
    return {method<store_open>("storeOpen"),
            method<store_serve>("storeServe"),
            method<store_server_port>("storeServerPort"),
            method<store_server_destroy>("storeServerDestroy"),
            method<store_destroy>("storeDestroy"),
            method<store_set>("storeSet"),
            method<store_get>("storeGet"),
            method<store_wait>("storeWait"),
            method<store_add>("storeAdd"),
            method<store_compare_set>("storeCompareSet"),
            method<store_delete>("storeDelete")};
}

}  // namespace tsr::jni
