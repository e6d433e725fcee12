// What a checkpoint saves and loads: named tensors and values. A Java object in it is three methods of
// dev.tessera.StatefulCalls, called on the thread of the save or load.
#include <optional>
#include <stdexcept>

#include "upcall.hpp"

namespace tsr::jni {

namespace {

jmethodID calls_collect, calls_check, calls_apply;

int32_t upcall_with(jmethodID method, const tsr_state* values, char* message, void* calls) {
    return upcall(message, [&](JNIEnv* env) {
        const jint status =
            env->CallIntMethod(static_cast<jobject>(calls), method, as_long(values), message_of(env, message));
        check_pending(env);
        return status;
    });
}

int32_t on_collect(tsr_state* values, char* message, void* calls) {
    return upcall_with(calls_collect, values, message, calls);
}

int32_t on_check(const tsr_state* values, char* message, void* calls) {
    return upcall_with(calls_check, values, message, calls);
}

int32_t on_apply(const tsr_state* values, char* message, void* calls) {
    return upcall_with(calls_apply, values, message, calls);
}

void on_destroy(void* calls) {
    JNIEnv* env = attached_env();
    if (env != nullptr) env->DeleteGlobalRef(static_cast<jobject>(calls));
}

// The library reads as many pieces as the layout gives `rank` boxes, so their number is checked here.
void state_add_sharded(JNIEnv* env, jclass, jlong state, jbyteArray name, jlong layout, jint dtype, jlongArray pieces,
                       jint rank) {
    shim(env, [&] {
        const Tensors list(env, pieces);
        int32_t boxes = 0;
        check(env, tsr_layout_box_count(as<tsr_layout>(layout), rank, &boxes));
        if (list.size() != static_cast<size_t>(boxes)) {
            const std::string message = "the layout gives rank " + std::to_string(rank) + " " + std::to_string(boxes) +
                                        " boxes, but " + std::to_string(list.size()) + " pieces were passed";
            throw_java(env, "java/lang/IllegalArgumentException", message.c_str());
            throw Pending{};
        }
        check(env, tsr_state_add_sharded(as<tsr_state>(state), Text(env, name).c_str(), as<tsr_layout>(layout), dtype,
                                         list.data(), rank));
    });
}

void state_add_source(JNIEnv* env, jclass, jlong state, jbyteArray prefix, jobject calls) {
    shim(env, [&] {
        const Text text(env, prefix);
        tsr_state_source source{};
        source.struct_size = sizeof source;
        source.collect = on_collect;
        source.check = on_check;
        source.apply = on_apply;
        source.destroy = on_destroy;
        source.user_data = env->NewGlobalRef(calls);
        if (source.user_data == nullptr) throw std::bad_alloc();
        check(env, tsr_state_add_source(as<tsr_state>(state), text.c_str(), &source));
    });
}

jbyteArray state_tensor_name(JNIEnv* env, jclass, jlong state, jlong index) {
    return shim(env, [&] {
        tsr_param tensor{};
        check(env, tsr_state_tensor(as<tsr_state>(state), static_cast<size_t>(index), &tensor));
        return bytes_of(env, tensor.name);
    });
}

// {dtype, sizes...}
jlongArray state_tensor_shape(JNIEnv* env, jclass, jlong state, jlong index) {
    return shim(env, [&] {
        tsr_param param{};
        check(env, tsr_state_tensor(as<tsr_state>(state), static_cast<size_t>(index), &param));
        std::vector<int64_t> words{param.tensor.dtype};
        words.insert(words.end(), param.tensor.shape, param.tensor.shape + param.tensor.ndim);
        return longs_of(env, words.data(), words.size());
    });
}

}  // namespace

void load_state_classes(JNIEnv* env) {
    const jclass calls = global_class(env, "dev/tessera/StatefulCalls");
    calls_collect = instance_method(env, calls, "collect", "(JLjava/nio/ByteBuffer;)I");
    calls_check = instance_method(env, calls, "check", "(JLjava/nio/ByteBuffer;)I");
    calls_apply = instance_method(env, calls, "apply", "(JLjava/nio/ByteBuffer;)I");
}

Methods state_methods() {
    return {method<state_add_sharded>("stateAddSharded"), method<state_add_source>("stateAddSource"),
            method<state_tensor_name>("stateTensorName"), method<state_tensor_shape>("stateTensorShape")};
}

}  // namespace tsr::jni
