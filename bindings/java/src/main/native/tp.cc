// Tensor-parallel training.
#include "upcall.hpp"

namespace tsr::jni {

namespace {

// Rules: `patterns`, `styles`, `dims`, `heads` and `layouts` (handles, or 0) have one element for each.
jlong tp_create(JNIEnv* env, jclass, jlong mesh, jobjectArray names, jlongArray tensors, jobjectArray patterns,
                jintArray styles, jintArray dims, jintArray heads, jlongArray layouts, jobject options) {
    return shim(env, [&] {
        const Params params(env, names, tensors);
        const std::vector<Text> pattern_texts = texts(env, patterns);
        const std::vector<int32_t> style_list = ints(env, styles);
        const std::vector<int32_t> dim_list = ints(env, dims);
        const std::vector<int32_t> head_list = ints(env, heads);
        const std::vector<int64_t> layout_list = longs(env, layouts);
        same_size(pattern_texts, style_list);
        same_size(pattern_texts, dim_list);
        same_size(pattern_texts, head_list);
        same_size(pattern_texts, layout_list);
        std::vector<tsr_tp_rule> rules;
        for (size_t i = 0; i < pattern_texts.size(); ++i) {
            rules.push_back({pattern_texts[i].c_str(), style_list[i], dim_list[i], as<tsr_layout>(layout_list[i]),
                             head_list[i], 0});
        }
        tsr_tp* tp = nullptr;
        blocking(env, [&] {
            return tsr_tp_create(as<tsr_mesh>(mesh), params.data(), params.size(), rules.data(), rules.size(),
                                 options_of<tsr_tp_options>(env, options), &tp);
        });
        return as_long(tp);
    });
}

jbyteArray tp_param_name(JNIEnv* env, jclass, jlong tp, jint index) {
    return shim(env, [&] {
        tsr_param param{};
        check(env, tsr_tp_param(as<tsr_tp>(tp), static_cast<size_t>(index), &param, nullptr, nullptr));
        return bytes_of(env, param.name);
    });
}

// The dimension along which it is cut (-1: none), and its whole shape.
jlongArray tp_param(JNIEnv* env, jclass, jlong tp, jint index) {
    return shim(env, [&] {
        tsr_param param{};
        int32_t cut = -1;
        check(env, tsr_tp_param(as<tsr_tp>(tp), static_cast<size_t>(index), &param, nullptr, &cut));
        std::vector<int64_t> facts{cut};
        facts.insert(facts.end(), param.tensor.shape, param.tensor.shape + param.tensor.ndim);
        return longs_of(env, facts.data(), facts.size());
    });
}

jlongArray tp_slice(JNIEnv* env, jclass, jlong tp, jint index) {
    return shim(env, [&] {
        tsr_param slice{};
        check(env, tsr_tp_slice(as<tsr_tp>(tp), static_cast<size_t>(index), &slice));
        return descriptor_of(env, slice.tensor);
    });
}

jmethodID part_call;

// Runs on the thread that enters or leaves; PartRelay.call lets nothing be thrown.
int32_t on_part(int64_t begin, const tsr_tensor* part, char* message, void* relay) {
    return upcall(message, [&](JNIEnv* env) {
        const jint status = env->CallIntMethod(static_cast<jobject>(relay), part_call, static_cast<jlong>(begin),
                                               descriptor_of(env, *part), message_of(env, message));
        check_pending(env);
        return status;
    });
}

void tp_enter_parts(JNIEnv* env, jclass, jlong tp, jlongArray input, jint dim, jlongArray output, jlong stream,
                    jobject relay) {
    shim(env, [&] {
        const Tensors in(env, input);
        const Tensors out(env, output);
        blocking(env, [&] {
            return tsr_tp_enter_parts(as<tsr_tp>(tp), in.data(), dim, out.data(), as<void>(stream), on_part, relay);
        });
    });
}

void tp_leave_parts(JNIEnv* env, jclass, jlong tp, jlong size, jint dim, jlongArray bias, jlongArray output,
                    jlong stream, jobject relay) {
    shim(env, [&] {
        const Tensors added(env, bias);
        const Tensors out(env, output);
        blocking(env, [&] {
            return tsr_tp_leave_parts(as<tsr_tp>(tp), size, dim, added.size() > 0 ? added.data() : nullptr, out.data(),
                                      as<void>(stream), on_part, relay);
        });
    });
}

// `options` lacks its pointers, which are `class_weights` and `data_ranks`; null and 0 for none.
jlong tp_cross_entropy(JNIEnv* env, jclass, jlong tp, jlongArray logits, jlong vocabulary, jlongArray targets,
                       jobject options, jlongArray class_weights, jlong data_ranks, jlongArray loss, jlongArray grad,
                       jlong stream, jboolean async) {
    return shim(env, [&] {
        const Tensors logits_list(env, logits);
        const Tensors targets_list(env, targets);
        const Tensors weights_list(env, class_weights);
        const Tensors loss_list(env, loss);
        const Tensors grad_list(env, grad);
        tsr_cross_entropy_options all = *options_of<tsr_cross_entropy_options>(env, options);
        all.class_weights = weights_list.data();
        all.data_ranks = as<tsr_comm>(data_ranks);
        return run(env, async, [&](tsr_work** work) {
            return tsr_tp_cross_entropy(as<tsr_tp>(tp), logits_list.data(), vocabulary, targets_list.data(), &all,
                                        loss_list.data(), grad_list.data(), as<void>(stream), work);
        });
    });
}

}  // namespace

void load_tp_classes(JNIEnv* env) {
    part_call = instance_method(env, global_class(env, "dev/tessera/PartRelay"), "call", "(J[JLjava/nio/ByteBuffer;)I");
}

Methods tp_methods() {
    return {method<tp_enter_parts>("tpEnterParts"),
            method<tp_leave_parts>("tpLeaveParts"),
            method<tp_create>("tpCreate"),
            method<tp_param_name>("tpParamName"),
            method<tp_param>("tpParam"),
            method<tp_slice>("tpSlice"),
            method<tp_cross_entropy>("tpCrossEntropy")};
}

}  // namespace tsr::jni
