// Values of the key-value store.
#include "jni.hpp"

namespace tsr::jni {

namespace {

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

}  // namespace

Methods store_methods() { return {method<store_get>("storeGet")}; }

}  // namespace tsr::jni
