// Fully sharded data-parallel training.
#include <numeric>

#include "jni.hpp"

namespace tsr::jni {

namespace {

// Parameters, and flags of them, follow each other over all units; `settings` has the structs of the units, `counts` the
// numbers of their parameters.
jlong fsdp_create(JNIEnv* env, jclass, jlong comm, jobjectArray unit_names, jobject settings, jintArray counts,
                  jobjectArray names, jlongArray tensors, jintArray trained, jobject options) {
    return shim(env, [&] {
        const std::vector<Text> unit_texts = texts(env, unit_names);
        const std::vector<int32_t> numbers = ints(env, counts);
        const Params params(env, names, tensors);
        const std::vector<int32_t> flags = ints(env, trained);
        const size_t total = std::accumulate(numbers.begin(), numbers.end(), size_t{0});
        const auto bytes = static_cast<jlong>(numbers.size() * sizeof(tsr_fsdp_unit));
        if (numbers.size() != unit_texts.size() || env->GetDirectBufferCapacity(settings) != bytes ||
            total != params.size() || flags.size() != total) {
            throw std::logic_error("units and parameters differ in number");
        }
        std::vector<tsr_fsdp_unit> units;
        units.reserve(numbers.size() + 1);  // not NULL for none, of which the library says what is wrong
        const auto* given = static_cast<const tsr_fsdp_unit*>(env->GetDirectBufferAddress(settings));
        if (!numbers.empty()) units.assign(given, given + numbers.size());
        size_t at = 0;
        for (size_t u = 0; u < units.size(); ++u) {
            units[u].name = unit_texts[u].c_str();
            units[u].params = params.data() + at;
            units[u].n = static_cast<size_t>(numbers[u]);
            units[u].trained = flags.data() + at;
            at += units[u].n;
        }
        tsr_fsdp* fsdp = nullptr;
        blocking(env, [&] {
            return tsr_fsdp_create(as<tsr_comm>(comm), units.data(), units.size(),
                                   options_of<tsr_fsdp_options>(env, options), &fsdp);
        });
        return as_long(fsdp);
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

}  // namespace

Methods fsdp_methods() {
    return {method<fsdp_create>("fsdpCreate"), method<fsdp_param_name>("fsdpParamName"),
            method<fsdp_param>("fsdpParam"), method<fsdp_shard>("fsdpShard")};
}

}  // namespace tsr::jni
