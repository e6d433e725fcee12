// Meshes: named arrangements of ranks.
#include "jni.hpp"

namespace tsr::jni {

namespace {

jlong mesh_create(JNIEnv* env, jclass, jlong comm, jobjectArray names, jintArray sizes) {
    return shim(env, [&] {
        const std::vector<Text> list = texts(env, names);
        std::vector<const char*> pointers;
        for (const Text& name : list) pointers.push_back(name.c_str());
        const std::vector<int32_t> numbers = ints(env, sizes);
        tsr_mesh* mesh = nullptr;
        blocking(env, [&] {
            return tsr_mesh_create(as<tsr_comm>(comm), pointers.data(), numbers.data(),
                                   static_cast<int32_t>(numbers.size()), &mesh);
        });
        return as_long(mesh);
    });
}

// size << 32 | coordinate
jlong mesh_dim(JNIEnv* env, jclass, jlong mesh, jbyteArray name) {
    return shim(env, [&]() -> jlong {
        int32_t size = 0;
        int32_t coordinate = 0;
        check(env, tsr_mesh_dim(as<tsr_mesh>(mesh), Text(env, name).c_str(), &size, &coordinate));
        return static_cast<jlong>(size) << 32 | coordinate;
    });
}

jlong mesh_slice(JNIEnv* env, jclass, jlong mesh, jobjectArray names) {
    return shim(env, [&] {
        const std::vector<Text> list = texts(env, names);
        std::vector<const char*> pointers;
        for (const Text& name : list) pointers.push_back(name.c_str());
        tsr_mesh* out = nullptr;
        check(env, tsr_mesh_slice(as<tsr_mesh>(mesh), pointers.data(), static_cast<int32_t>(pointers.size()), &out));
        return as_long(out);
    });
}

}  // namespace

Methods mesh_methods() {
    return {method<mesh_create>("meshCreate"), method<mesh_dim>("meshDim"), method<mesh_slice>("meshSlice")};
}

}  // namespace tsr::jni
