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

jlong state_create(JNIEnv* env, jclass) {
    return shim(env, [&] {
        tsr_state* state = nullptr;
        check(env, tsr_state_create(&state));
        return as_long(state);
    });
}

void state_add_tensor(JNIEnv* env, jclass, jlong state, jbyteArray name, jlongArray tensor) {
    shim(env, [&] {
        const Tensors one(env, tensor);
        check(env, tsr_state_add_tensor(as<tsr_state>(state), Text(env, name).c_str(), one.data()));
    });
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

void state_add_ddp(JNIEnv* env, jclass, jlong state, jbyteArray prefix, jlong ddp) {
    shim(env,
         [&] { check(env, tsr_state_add_ddp(as<tsr_state>(state), Text(env, prefix).c_str(), as<tsr_ddp>(ddp))); });
}

void state_add_fsdp(JNIEnv* env, jclass, jlong state, jbyteArray prefix, jlong fsdp) {
    shim(env,
         [&] { check(env, tsr_state_add_fsdp(as<tsr_state>(state), Text(env, prefix).c_str(), as<tsr_fsdp>(fsdp))); });
}

void state_add_optimizer(JNIEnv* env, jclass, jlong state, jbyteArray prefix, jlong optimizer) {
    shim(env, [&] {
        check(env,
              tsr_state_add_optimizer(as<tsr_state>(state), Text(env, prefix).c_str(), as<tsr_optimizer>(optimizer)));
    });
}

void state_add_grad_scaler(JNIEnv* env, jclass, jlong state, jbyteArray prefix, jlong scaler) {
    shim(env, [&] {
        check(env,
              tsr_state_add_grad_scaler(as<tsr_state>(state), Text(env, prefix).c_str(), as<tsr_grad_scaler>(scaler)));
    });
}

void state_add_sampler(JNIEnv* env, jclass, jlong state, jbyteArray prefix, jlong sampler) {
    shim(env, [&] {
        check(env, tsr_state_add_sampler(as<tsr_state>(state), Text(env, prefix).c_str(), as<tsr_sampler>(sampler)));
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

void state_set_long(JNIEnv* env, jclass, jlong state, jbyteArray name, jlong value) {
    shim(env, [&] { check(env, tsr_state_set_int64(as<tsr_state>(state), Text(env, name).c_str(), value)); });
}

jlong state_get_long(JNIEnv* env, jclass, jlong state, jbyteArray name) {
    return shim(env, [&]() -> jlong {
        int64_t value = 0;
        check(env, tsr_state_get_int64(as<tsr_state>(state), Text(env, name).c_str(), &value));
        return value;
    });
}

void state_set_double(JNIEnv* env, jclass, jlong state, jbyteArray name, jdouble value) {
    shim(env, [&] { check(env, tsr_state_set_double(as<tsr_state>(state), Text(env, name).c_str(), value)); });
}

jdouble state_get_double(JNIEnv* env, jclass, jlong state, jbyteArray name) {
    return shim(env, [&]() -> jdouble {
        double value = 0;
        check(env, tsr_state_get_double(as<tsr_state>(state), Text(env, name).c_str(), &value));
        return value;
    });
}

void state_set_value(JNIEnv* env, jclass, jlong state, jbyteArray name, jbyteArray json) {
    shim(env, [&] {
        check(env, tsr_state_set_value(as<tsr_state>(state), Text(env, name).c_str(), Text(env, json).c_str()));
    });
}

jbyteArray state_get_value(JNIEnv* env, jclass, jlong state, jbyteArray name) {
    return shim(env, [&] {
        const Text key(env, name);
        return text_of(env, [&](char* text, size_t capacity, size_t* size) {
            return tsr_state_get_value(as<tsr_state>(state), key.c_str(), text, capacity, size);
        });
    });
}

jlong state_tensor_count(JNIEnv* env, jclass, jlong state) {
    return shim(env, [&]() -> jlong {
        size_t count = 0;
        check(env, tsr_state_tensor_count(as<tsr_state>(state), &count));
        return static_cast<jlong>(count);
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

// `whole` is null where nothing is gathered.
void state_gather(JNIEnv* env, jclass, jlong state, jlong comm, jbyteArray name, jint root, jlongArray whole) {
    shim(env, [&] {
        const Text text(env, name);
        std::optional<Tensors> memory;
        if (whole != nullptr) memory.emplace(env, whole);
        blocking(env, [&] {
            return tsr_state_gather(as<tsr_state>(state), as<tsr_comm>(comm), text.c_str(), root,
                                    memory ? memory->data() : nullptr);
        });
    });
}

void state_set_metric(JNIEnv* env, jclass, jlong state, jbyteArray name, jdouble value) {
    shim(env, [&] { check(env, tsr_state_set_metric(as<tsr_state>(state), Text(env, name).c_str(), value)); });
}

void state_destroy(JNIEnv*, jclass, jlong state) { tsr_state_destroy(as<tsr_state>(state)); }

}  // namespace

void load_state_classes(JNIEnv* env) {
    const jclass calls = global_class(env, "dev/tessera/StatefulCalls");
    calls_collect = instance_method(env, calls, "collect", "(JLjava/nio/ByteBuffer;)I");
    calls_check = instance_method(env, calls, "check", "(JLjava/nio/ByteBuffer;)I");
    calls_apply = instance_method(env, calls, "apply", "(JLjava/nio/ByteBuffer;)I");
}

Methods state_methods() {
    return {method<state_create>("stateCreate"),
            method<state_add_tensor>("stateAddTensor"),
            method<state_add_sharded>("stateAddSharded"),
            method<state_add_ddp>("stateAddDdp"),
            method<state_add_fsdp>("stateAddFsdp"),
            method<state_add_optimizer>("stateAddOptimizer"),
            method<state_add_grad_scaler>("stateAddGradScaler"),
            method<state_add_sampler>("stateAddSampler"),
            method<state_add_source>("stateAddSource"),
            method<state_set_long>("stateSetLong"),
            method<state_get_long>("stateGetLong"),
            method<state_set_double>("stateSetDouble"),
            method<state_get_double>("stateGetDouble"),
            method<state_set_value>("stateSetValue"),
            method<state_get_value>("stateGetValue"),
            method<state_tensor_count>("stateTensorCount"),
            method<state_tensor_name>("stateTensorName"),
            method<state_tensor_shape>("stateTensorShape"),
            method<state_gather>("stateGather"),
            method<state_set_metric>("stateSetMetric"),
            method<state_destroy>("stateDestroy")};
}

}  // namespace tsr::jni
