// Pipeline-parallel training. The callbacks run on the thread that steps the pipeline and are one method,
// dev.tessera.StageRelay.call, which lets nothing be thrown. A call crosses as one long[]: its numbers, the lengths of
// its lists of tensors, and their descriptors.
#include <algorithm>
#include <bit>

#include "upcall.hpp"

namespace tsr::jni {

namespace {

jmethodID relay_call;

int32_t on_call(const tsr_stage_call* call, char* message, void* relay) {
    return upcall(message, [&](JNIEnv* env) {
        static_assert(sizeof(double) == sizeof(int64_t));
        std::vector<int64_t> words{call->work,
                                   call->stage,
                                   call->microbatch,
                                   call->microbatches,
                                   call->training,
                                   call->is_last_backward,
                                   std::bit_cast<int64_t>(call->weight),
                                   static_cast<int64_t>(call->n_inputs),
                                   static_cast<int64_t>(call->n_targets),
                                   static_cast<int64_t>(call->n_outputs),
                                   static_cast<int64_t>(call->n_output_grads),
                                   static_cast<int64_t>(call->n_input_grads)};
        const auto add = [&](const tsr_tensor* tensors, size_t n) {
            for (size_t i = 0; i < n; ++i) describe(words, tensors[i]);
        };
        add(call->inputs, call->n_inputs);
        add(call->targets, call->n_targets);
        add(call->outputs, call->n_outputs);
        add(call->output_grads, call->n_output_grads);
        add(call->input_grads, call->n_input_grads);
        const jint status = env->CallIntMethod(static_cast<jobject>(relay), relay_call,
                                               longs_of(env, words.data(), words.size()), message_of(env, message));
        check_pending(env);
        return status;
    });
}

void drop_relay(void* relay) {
    JNIEnv* env = attached_env();
    if (env != nullptr) env->DeleteGlobalRef(static_cast<jobject>(relay));
}

// `edges` has three numbers for each: from stage, output, to stage. `split`: all stages can split their backward.
jlong pipeline_create(JNIEnv* env, jclass, jlong comm, jintArray stages, jobject relay, jboolean split, jintArray edges,
                      jobject options) {
    return shim(env, [&] {
        const std::vector<int32_t> own = ints(env, stages);
        const std::vector<int32_t> numbers = ints(env, edges);
        std::vector<tsr_pipeline_edge> list;
        for (size_t i = 0; i + 2 < numbers.size(); i += 3) {
            list.push_back({numbers[i], numbers[i + 1], numbers[i + 2], 0});
        }
        tsr_pipeline_options with_edges = *options_of<tsr_pipeline_options>(env, options);
        with_edges.edges = list.data();
        with_edges.edge_count = list.size();
        tsr_pipeline_callbacks callbacks{};
        callbacks.struct_size = sizeof callbacks;
        callbacks.forward = callbacks.backward = on_call;
        if (split) callbacks.backward_input = callbacks.backward_weight = on_call;
        callbacks.destroy = drop_relay;
        callbacks.user_data = env->NewGlobalRef(relay);
        if (callbacks.user_data == nullptr) throw std::bad_alloc();
        tsr_pipeline* pipeline = nullptr;
        blocking(env, [&] {
            return tsr_pipeline_create(as<tsr_comm>(comm), own.data(), own.size(), &callbacks, &with_edges, &pipeline);
        });
        return as_long(pipeline);
    });
}

jdoubleArray pass(JNIEnv* env, decltype(&tsr_pipeline_step) run, jlong pipeline, jlongArray batch, jlongArray targets,
                  jdoubleArray weights) {
    return shim(env, [&] {
        const Tensors inputs(env, batch);
        const Tensors goals(env, targets);
        const jsize n_weights = weights == nullptr ? 0 : env->GetArrayLength(weights);
        std::vector<double> factors(static_cast<size_t>(n_weights) + 1);  // so that none of them is not NULL
        if (weights != nullptr) env->GetDoubleArrayRegion(weights, 0, n_weights, factors.data());
        check_pending(env);
        int32_t microbatches = 0;
        check(env, tsr_pipeline_microbatches(as<tsr_pipeline>(pipeline), &microbatches));
        std::vector<double> losses(static_cast<size_t>(microbatches));
        blocking(env, [&] {
            return run(as<tsr_pipeline>(pipeline), inputs.data(), inputs.size(), goals.data(), goals.size(),
                       weights == nullptr ? nullptr : factors.data(), static_cast<size_t>(n_weights), losses.data(),
                       losses.size());
        });
        const jdoubleArray out = env->NewDoubleArray(microbatches);
        check_pending(env);
        env->SetDoubleArrayRegion(out, 0, microbatches, losses.data());
        check_pending(env);
        return out;
    });
}

jdoubleArray pipeline_step(JNIEnv* env, jclass, jlong pipeline, jlongArray batch, jlongArray targets,
                           jdoubleArray weights) {
    return pass(env, tsr_pipeline_step, pipeline, batch, targets, weights);
}

jdoubleArray pipeline_eval(JNIEnv* env, jclass, jlong pipeline, jlongArray batch, jlongArray targets,
                           jdoubleArray weights) {
    return pass(env, tsr_pipeline_eval, pipeline, batch, targets, weights);
}

jlongArray pipeline_output(JNIEnv* env, jclass, jlong pipeline, jint dtype, jlongArray shape) {
    return shim(env, [&] {
        const std::vector<int64_t> sizes = longs(env, shape);
        tsr_tensor tensor{};
        check(env, tsr_pipeline_output(as<tsr_pipeline>(pipeline), dtype, sizes.data(),
                                       static_cast<int32_t>(sizes.size()), &tensor));
        return descriptor_of(env, tensor);
    });
}

void pipeline_sum_tied(JNIEnv* env, jclass, jlong pipeline, jlongArray gradient, jintArray stages) {
    shim(env, [&] {
        const Tensors tensor(env, gradient);
        const std::vector<int32_t> own = ints(env, stages);
        blocking(env, [&] {
            return tsr_pipeline_sum_tied(as<tsr_pipeline>(pipeline), tensor.data(), own.data(), own.size());
        });
    });
}

// The fields of tsr_pass_stats in their order.
jlongArray pipeline_stats(JNIEnv* env, jclass, jlong pipeline) {
    return shim(env, [&] {
        tsr_pass_stats stats{};
        stats.struct_size = sizeof stats;
        check(env, tsr_pipeline_stats(as<tsr_pipeline>(pipeline), &stats));
        const int64_t values[] = {stats.wall_ns,
                                  stats.busy_ns,
                                  stats.waited_ns,
                                  stats.longest_ns,
                                  stats.longest_stage,
                                  stats.longest_rank,
                                  static_cast<int64_t>(stats.peak_activations),
                                  static_cast<int64_t>(stats.peak_bytes)};
        return longs_of(env, values, std::size(values));
    });
}

}  // namespace

void load_pipeline_classes(JNIEnv* env) {
    relay_call =
        instance_method(env, global_class(env, "dev/tessera/StageRelay"), "call", "([JLjava/nio/ByteBuffer;)I");
}

Methods pipeline_methods() {
    return {method<pipeline_create>("pipelineCreate"),    method<pipeline_step>("pipelineStep"),
            method<pipeline_eval>("pipelineEval"),        method<pipeline_output>("pipelineOutput"),
            method<pipeline_sum_tied>("pipelineSumTied"), method<pipeline_stats>("pipelineStats")};
}

}  // namespace tsr::jni
