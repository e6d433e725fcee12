// DeepSpeed's engine, and its loss scale.
#include <bit>
#include <numeric>

#include "jni.hpp"

namespace tsr::jni {

namespace {

// Parameters follow each other over all units; `counts` has the numbers of those of each unit. `schedule` may be 0.
jlong engine_create(JNIEnv* env, jclass, jlong comm, jobjectArray unit_names, jintArray counts, jobjectArray names,
                    jlongArray tensors, jbyteArray config, jlong schedule) {
    return shim(env, [&] {
        const std::vector<Text> unit_texts = texts(env, unit_names);
        const std::vector<int32_t> numbers = ints(env, counts);
        const Params params(env, names, tensors);
        const Text text(env, config);
        same_size(unit_texts, numbers);
        if (std::accumulate(numbers.begin(), numbers.end(), size_t{0}) != params.size()) {
            throw std::logic_error("units and parameters differ in number");
        }
        std::vector<tsr_engine_unit> units;
        units.reserve(numbers.size() + 1);  // not NULL for none, of which the library says what is wrong
        const tsr_param* first = params.data();
        for (size_t u = 0; u < numbers.size(); ++u) {
            const auto n = static_cast<size_t>(numbers[u]);
            units.push_back({unit_texts[u].c_str(), first, n, 0});
            first += n;
        }
        tsr_engine* engine = nullptr;
        blocking(env, [&] {
            return tsr_engine_create(as<tsr_comm>(comm), units.data(), units.size(), text.c_str(),
                                     as<tsr_lr_schedule>(schedule), &engine);
        });
        return as_long(engine);
    });
}

jbyteArray engine_param_name(JNIEnv* env, jclass, jlong engine, jlong index) {
    return shim(env, [&] {
        const char* name = nullptr;
        check(env, tsr_engine_param_name(as<tsr_engine>(engine), static_cast<size_t>(index), &name, nullptr));
        return bytes_of(env, name);
    });
}

// {global steps, global samples, skipped steps, micro-steps}
jlongArray engine_counters(JNIEnv* env, jclass, jlong engine) {
    return shim(env, [&] {
        tsr_engine_counts counts{};
        counts.struct_size = sizeof counts;
        check(env, tsr_engine_counters(as<tsr_engine>(engine), &counts));
        const int64_t all[]{counts.global_steps, counts.global_samples, counts.skipped_steps, counts.micro_steps};
        return longs_of(env, all, std::size(all));
    });
}

// {train, micro, accumulation}
jlongArray engine_batch(JNIEnv* env, jclass, jlong engine) {
    return shim(env, [&] {
        int64_t sizes[3]{};
        check(env, tsr_engine_batch(as<tsr_engine>(engine), &sizes[0], &sizes[1], &sizes[2]));
        return longs_of(env, sizes, std::size(sizes));
    });
}

// {bits of the scale, iteration, last overflow, hysteresis}
jlongArray loss_scale_get_state(JNIEnv* env, jclass, jlong scale) {
    return shim(env, [&] {
        tsr_loss_scale_state state{};
        state.struct_size = sizeof state;
        check(env, tsr_loss_scale_get_state(as<tsr_loss_scale>(scale), &state));
        const int64_t all[]{std::bit_cast<int64_t>(state.scale), state.iteration, state.last_overflow,
                            state.hysteresis};
        return longs_of(env, all, std::size(all));
    });
}

void loss_scale_set_state(JNIEnv* env, jclass, jlong scale, jdouble value, jlong iteration, jlong last_overflow,
                          jlong hysteresis) {
    shim(env, [&] {
        const tsr_loss_scale_state state{sizeof state, value, iteration, last_overflow, hysteresis};
        check(env, tsr_loss_scale_set_state(as<tsr_loss_scale>(scale), &state));
    });
}

}  // namespace

Methods engine_methods() {
    return {method<engine_create>("engineCreate"),
            method<engine_param_name>("engineParamName"),
            method<engine_counters>("engineCounters"),
            method<engine_batch>("engineBatch"),
            method<loss_scale_get_state>("lossScaleGetState"),
            method<loss_scale_set_state>("lossScaleSetState")};
}

}  // namespace tsr::jni
