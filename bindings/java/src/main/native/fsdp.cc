// Fully sharded data-parallel training.
#include <stdexcept>

#include "jni.hpp"

namespace tsr::jni {

namespace {

// Parameters, and flags of them, follow each other over all units; `settings` has of each unit the number of them and its
// reshard_after_forward, param_dtype, reduce_dtype, row_block and flat. Bits of `given`: 0 shard_ranks, 1 forward_prefetch, and so on in the
// order of the arguments.
jlong fsdp_create(JNIEnv* env, jclass, jlong comm, jobjectArray unit_names, jintArray settings, jobjectArray names,
                  jlongArray tensors, jintArray trained, jint given, jint shard_ranks, jint forward_prefetch,
                  jint backward_prefetch, jint grads_in_flight, jint param_dtype, jint reduce_dtype, jint op,
                  jdouble pre_divide, jboolean sync_values) {
    return shim(env, [&] {
        const std::vector<Text> unit_texts = texts(env, unit_names);
        const std::vector<int32_t> words = ints(env, settings);
        const Params params(env, names, tensors);
        const std::vector<int32_t> flags = ints(env, trained);
        constexpr size_t of_unit = 6;
        size_t total = 0;
        for (size_t at = 0; at < words.size(); at += of_unit) total += static_cast<size_t>(words[at]);
        if (words.size() != of_unit * unit_texts.size() || total != params.size() || flags.size() != total) {
            throw std::logic_error("units and parameters differ in number");
        }
        std::vector<tsr_fsdp_unit> units(unit_texts.size());
        units.reserve(units.size() + 1);  // not NULL for none, of which the library says what is wrong
        size_t at = 0;
        for (size_t u = 0; u < units.size(); ++u) {
            units[u].name = unit_texts[u].c_str();
            units[u].params = params.data() + at;
            units[u].n = static_cast<size_t>(words[of_unit * u]);
            units[u].trained = flags.data() + at;
            units[u].reshard_after_forward = words[of_unit * u + 1];
            units[u].param_dtype = words[of_unit * u + 2];
            units[u].reduce_dtype = words[of_unit * u + 3];
            units[u].row_block = words[of_unit * u + 4];
            units[u].flat = words[of_unit * u + 5];
            at += units[u].n;
        }
        tsr_fsdp_options options;
        check(env, tsr_fsdp_options_init(&options, sizeof options));
        set_if(given, 0, options.shard_ranks, shard_ranks);
        set_if(given, 1, options.forward_prefetch, forward_prefetch);
        set_if(given, 2, options.backward_prefetch, backward_prefetch);
        set_if(given, 3, options.grads_in_flight, grads_in_flight);
        set_if(given, 4, options.param_dtype, param_dtype);
        set_if(given, 5, options.reduce_dtype, reduce_dtype);
        set_if(given, 6, options.op, op);
        set_if(given, 7, options.pre_divide, pre_divide);
        set_if(given, 8, options.sync_values, sync_values);
        tsr_fsdp* fsdp = nullptr;
        blocking(env, [&] { return tsr_fsdp_create(as<tsr_comm>(comm), units.data(), units.size(), &options, &fsdp); });
        return as_long(fsdp);
    });
}

jint fsdp_unit_count(JNIEnv* env, jclass, jlong fsdp) {
    return shim(env, [&]() -> jint {
        size_t count = 0;
        check(env, tsr_fsdp_unit_count(as<tsr_fsdp>(fsdp), &count));
        return static_cast<jint>(count);
    });
}

jint fsdp_param_count(JNIEnv* env, jclass, jlong fsdp) {
    return shim(env, [&]() -> jint {
        size_t count = 0;
        check(env, tsr_fsdp_param_count(as<tsr_fsdp>(fsdp), &count));
        return static_cast<jint>(count);
    });
}

jbyteArray fsdp_unit_name(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    return shim(env, [&] {
        const char* name = nullptr;
        check(env, tsr_fsdp_unit_name(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit), &name));
        return bytes_of(env, name);
    });
}

jint fsdp_unit_phase(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    return shim(env, [&]() -> jint {
        int32_t phase = 0;
        check(env, tsr_fsdp_unit_phase(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit), &phase));
        return phase;
    });
}

jbyteArray fsdp_param_name(JNIEnv* env, jclass, jlong fsdp, jint index) {
    return shim(env, [&] {
        tsr_param param{};
        check(env, tsr_fsdp_param(as<tsr_fsdp>(fsdp), static_cast<size_t>(index), &param, nullptr, nullptr));
        return bytes_of(env, param.name);
    });
}

// Its unit, whether it is trained, and its whole shape.
jlongArray fsdp_param(JNIEnv* env, jclass, jlong fsdp, jint index) {
    return shim(env, [&] {
        tsr_param param{};
        size_t unit = 0;
        int32_t trained = 0;
        check(env, tsr_fsdp_param(as<tsr_fsdp>(fsdp), static_cast<size_t>(index), &param, &unit, &trained));
        std::vector<int64_t> facts{static_cast<int64_t>(unit), trained};
        facts.insert(facts.end(), param.tensor.shape, param.tensor.shape + param.tensor.ndim);
        return longs_of(env, facts.data(), facts.size());
    });
}

jlongArray fsdp_shard(JNIEnv* env, jclass, jlong fsdp, jint index) {
    return shim(env, [&] {
        tsr_param shard{};
        check(env, tsr_fsdp_shard(as<tsr_fsdp>(fsdp), static_cast<size_t>(index), &shard));
        return descriptor_of(env, shard.tensor);
    });
}

template <class Fsdp>
jlongArray view(JNIEnv* env, tsr_status (*get)(Fsdp*, size_t, tsr_tensor*), jlong fsdp, jint index) {
    return shim(env, [&] {
        tsr_tensor tensor{};
        check(env, get(as<tsr_fsdp>(fsdp), static_cast<size_t>(index), &tensor));
        return descriptor_of(env, tensor);
    });
}

jlongArray fsdp_shard_grad(JNIEnv* env, jclass, jlong fsdp, jint index) {
    return view(env, tsr_fsdp_shard_grad, fsdp, index);
}

jlong fsdp_layout(JNIEnv* env, jclass, jlong fsdp, jint index) {
    return shim(env, [&] {
        tsr_layout* layout = nullptr;
        check(env, tsr_fsdp_layout(as<tsr_fsdp>(fsdp), static_cast<size_t>(index), &layout));
        return as_long(layout);
    });
}

jlongArray fsdp_whole(JNIEnv* env, jclass, jlong fsdp, jint index) { return view(env, tsr_fsdp_whole, fsdp, index); }

jlongArray fsdp_grad(JNIEnv* env, jclass, jlong fsdp, jint index) { return view(env, tsr_fsdp_grad, fsdp, index); }

void fsdp_forward(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    shim(env, [&] { blocking(env, [&] { return tsr_fsdp_forward(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit)); }); });
}

void fsdp_forward_done(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    shim(env,
         [&] { blocking(env, [&] { return tsr_fsdp_forward_done(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit)); }); });
}

void fsdp_backward(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    shim(env, [&] { blocking(env, [&] { return tsr_fsdp_backward(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit)); }); });
}

void fsdp_unused(JNIEnv* env, jclass, jlong fsdp, jint index) {
    shim(env, [&] { check(env, tsr_fsdp_unused(as<tsr_fsdp>(fsdp), static_cast<size_t>(index))); });
}

jboolean fsdp_used(JNIEnv* env, jclass, jlong fsdp, jint index) {
    return shim(env, [&]() -> jboolean {
        int32_t used = 0;
        check(env, tsr_fsdp_used(as<tsr_fsdp>(fsdp), static_cast<size_t>(index), &used));
        return used != 0;
    });
}

void fsdp_grads_ready(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    shim(env, [&] { check(env, tsr_fsdp_grads_ready(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit))); });
}

void fsdp_wait(JNIEnv* env, jclass, jlong fsdp) {
    shim(env, [&] { blocking(env, [&] { return tsr_fsdp_wait(as<tsr_fsdp>(fsdp)); }); });
}

void fsdp_abandon(JNIEnv* env, jclass, jlong fsdp) {
    shim(env, [&] { blocking(env, [&] { return tsr_fsdp_abandon(as<tsr_fsdp>(fsdp)); }); });
}

void fsdp_unshard(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    shim(env, [&] { check(env, tsr_fsdp_unshard(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit))); });
}

void fsdp_await(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    shim(env, [&] { blocking(env, [&] { return tsr_fsdp_await(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit)); }); });
}

// Of a unit on its way it waits until that is whole.
void fsdp_reshard(JNIEnv* env, jclass, jlong fsdp, jint unit) {
    shim(env, [&] { blocking(env, [&] { return tsr_fsdp_reshard(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit)); }); });
}

void fsdp_set_sync(JNIEnv* env, jclass, jlong fsdp, jboolean sync) {
    shim(env, [&] { check(env, tsr_fsdp_set_sync(as<tsr_fsdp>(fsdp), sync ? 1 : 0)); });
}

void fsdp_set_accumulate(JNIEnv* env, jclass, jlong fsdp, jboolean accumulate) {
    shim(env, [&] { check(env, tsr_fsdp_set_accumulate(as<tsr_fsdp>(fsdp), accumulate ? 1 : 0)); });
}

void fsdp_set_all_reduce(JNIEnv* env, jclass, jlong fsdp, jboolean all_reduce) {
    shim(env, [&] { check(env, tsr_fsdp_set_all_reduce(as<tsr_fsdp>(fsdp), all_reduce ? 1 : 0)); });
}

void fsdp_set_reshard_after_backward(JNIEnv* env, jclass, jlong fsdp, jint unit, jboolean reshard) {
    shim(env, [&] {
        check(env, tsr_fsdp_set_reshard_after_backward(as<tsr_fsdp>(fsdp), static_cast<size_t>(unit), reshard ? 1 : 0));
    });
}

void fsdp_zero_grad(JNIEnv* env, jclass, jlong fsdp) {
    shim(env, [&] { check(env, tsr_fsdp_zero_grad(as<tsr_fsdp>(fsdp))); });
}

void fsdp_destroy(JNIEnv*, jclass, jlong fsdp) { tsr_fsdp_destroy(as<tsr_fsdp>(fsdp)); }

}  // namespace

Methods fsdp_methods() {
    return {method<fsdp_create>("fsdpCreate"),
            method<fsdp_unit_count>("fsdpUnitCount"),
            method<fsdp_param_count>("fsdpParamCount"),
            method<fsdp_unit_name>("fsdpUnitName"),
            method<fsdp_unit_phase>("fsdpUnitPhase"),
            method<fsdp_param_name>("fsdpParamName"),
            method<fsdp_param>("fsdpParam"),
            method<fsdp_shard>("fsdpShard"),
            method<fsdp_shard_grad>("fsdpShardGrad"),
            method<fsdp_layout>("fsdpLayout"),
            method<fsdp_whole>("fsdpWhole"),
            method<fsdp_grad>("fsdpGrad"),
            method<fsdp_forward>("fsdpForward"),
            method<fsdp_forward_done>("fsdpForwardDone"),
            method<fsdp_backward>("fsdpBackward"),
            method<fsdp_unused>("fsdpUnused"),
            method<fsdp_used>("fsdpUsed"),
            method<fsdp_grads_ready>("fsdpGradsReady"),
            method<fsdp_wait>("fsdpWait"),
            method<fsdp_abandon>("fsdpAbandon"),
            method<fsdp_unshard>("fsdpUnshard"),
            method<fsdp_await>("fsdpAwait"),
            method<fsdp_reshard>("fsdpReshard"),
            method<fsdp_set_sync>("fsdpSetSync"),
            method<fsdp_set_accumulate>("fsdpSetAccumulate"),
            method<fsdp_set_all_reduce>("fsdpSetAllReduce"),
            method<fsdp_set_reshard_after_backward>("fsdpSetReshardAfterBackward"),
            method<fsdp_zero_grad>("fsdpZeroGrad"),
            method<fsdp_destroy>("fsdpDestroy")};
}

}  // namespace tsr::jni
