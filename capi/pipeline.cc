// tessera/pipeline.h: pipeline-parallel training. A callback may destroy the pipeline that it serves, so the calls that
// run callbacks hold it.
#include "tessera/pipeline.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/attempt.hpp"
#include "callback.hpp"
#include "comm/communicator.hpp"
#include "comm/fingerprint.hpp"
#include "handles.hpp"
#include "parallel/pipeline/pipeline.hpp"

namespace tsr::capi {

namespace {

using pipeline::Batch;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::StageCall;

constexpr tsr_pipeline_options default_options{.struct_size = sizeof(tsr_pipeline_options),
                                               .schedule = TSR_SCHEDULE_1F1B,
                                               .microbatches = 0,
                                               .schedule_csv = nullptr,
                                               .edges = nullptr,
                                               .edge_count = 0,
                                               .max_message_bytes = uint64_t{1} << 30,
                                               .on_device = 0};

std::string schedule_name(tsr_schedule schedule) {
    switch (schedule) {
        case TSR_SCHEDULE_GPIPE: return "gpipe";
        case TSR_SCHEDULE_1F1B: return "1f1b";
        case TSR_SCHEDULE_LOOPED_BFS: return "looped_bfs";
        case TSR_SCHEDULE_INTERLEAVED_1F1B: return "interleaved_1f1b";
        case TSR_SCHEDULE_INTERLEAVED_ZERO_BUBBLE: return "interleaved_zero_bubble";
        case TSR_SCHEDULE_ZB_H2: return "zb_h2";
        case TSR_SCHEDULE_ZBV: return "zbv";
        case TSR_SCHEDULE_DUALPIPEV: return "dualpipev";
        default:
            throw Error(Code::invalid_argument,
                        fmt::format("schedule is {}; use one of the TSR_SCHEDULE_ constants", schedule));
    }
}

PipelineOptions core_options(const tsr_pipeline_options* options) {
    const auto o = options_in(options, default_options, "options");
    PipelineOptions core;
    core.schedule = schedule_name(o.schedule);
    if (o.schedule_csv != nullptr) core.schedule_csv = o.schedule_csv;
    if (o.schedule_csv != nullptr && core.schedule_csv.empty()) {
        throw Error(Code::invalid_argument, "schedule_csv is empty; pass NULL to use `schedule`");
    }
    core.microbatches = o.microbatches;
    core.max_message_bytes = o.max_message_bytes;
    core.on_device = flag(o.on_device, "on_device");
    if (o.edge_count > 0) required(o.edges, "edges");
    for (size_t i = 0; i < o.edge_count; ++i) {
        const tsr_pipeline_edge& edge = o.edges[i];
        if (edge.reserved != 0) {
            throw Error(Code::invalid_argument,
                        fmt::format("edges[{}].reserved is {}; it must be 0", i, edge.reserved));
        }
        core.edges.push_back({edge.from_stage, edge.output, edge.to_stage});
    }
    return core;
}

tsr_stage_work work_out(pipeline::Work work) {
    switch (work) {
        case pipeline::Work::forward: return TSR_STAGE_FORWARD;
        case pipeline::Work::backward: return TSR_STAGE_BACKWARD;
        case pipeline::Work::backward_input: return TSR_STAGE_BACKWARD_INPUT;
        case pipeline::Work::backward_weight: return TSR_STAGE_BACKWARD_WEIGHT;
    }
    return 0;
}

std::vector<tsr_tensor> tensors_out(std::span<const Tensor> tensors) {
    std::vector<tsr_tensor> out;
    out.reserve(tensors.size());
    for (const Tensor& tensor : tensors) out.push_back(tensor_out(tensor));
    return out;
}

// The program's callbacks and data, which go with this object.
class Trainer {
   public:
    explicit Trainer(const tsr_pipeline_callbacks& table) : table_(table) {}
    ~Trainer() {
        if (table_.destroy != nullptr) table_.destroy(table_.user_data);
    }
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    [[nodiscard]] const tsr_pipeline_callbacks& table() const { return table_; }

    void call(tsr_stage_fn fn, const StageCall& call) const {
        const auto inputs = tensors_out(call.inputs);
        const auto targets = tensors_out(call.targets);
        const auto outputs = tensors_out(call.outputs);
        const auto output_grads = tensors_out(call.output_grads);
        const auto input_grads = tensors_out(call.input_grads);
        const tsr_stage_call view{.struct_size = sizeof(tsr_stage_call),
                                  .work = work_out(call.work),
                                  .stage = call.stage,
                                  .microbatch = call.microbatch,
                                  .microbatches = call.microbatches,
                                  .training = call.training ? 1 : 0,
                                  .is_last_backward = call.is_last_backward ? 1 : 0,
                                  .weight = call.weight,
                                  .inputs = inputs.data(),
                                  .n_inputs = inputs.size(),
                                  .targets = targets.data(),
                                  .n_targets = targets.size(),
                                  .outputs = outputs.data(),
                                  .n_outputs = outputs.size(),
                                  .output_grads = output_grads.data(),
                                  .n_output_grads = output_grads.size(),
                                  .input_grads = input_grads.data(),
                                  .n_input_grads = input_grads.size()};
        Reply reply;
        reply.check(fn(&view, reply.message(), table_.user_data), [] { return "the callback failed"; });
    }

   private:
    const tsr_pipeline_callbacks table_;
};

pipeline::Callbacks callbacks_of(const std::shared_ptr<const Trainer>& trainer) {
    pipeline::Callbacks callbacks;
    const auto set = [&](pipeline::Callback& callback, tsr_stage_fn fn) {
        if (fn != nullptr) callback = [trainer, fn](const StageCall& call) { trainer->call(fn, call); };
    };
    const tsr_pipeline_callbacks& table = trainer->table();
    set(callbacks.forward, table.forward);
    set(callbacks.backward, table.backward);
    set(callbacks.backward_input, table.backward_input);
    set(callbacks.backward_weight, table.backward_weight);
    return callbacks;
}

std::vector<int> stages_in(const int32_t* stages, size_t n) {
    if (n > 0) required(stages, "stages");
    return {stages, stages + n};
}

using PassFn = std::span<const double> (Pipeline::*)(const Batch& batch);

// The arguments of a step that the core does not have: where the losses go.
struct Losses {
    double* values;
    size_t count;
};

void run(tsr_pipeline* handle, PassFn pass, const tsr_tensor* batch, size_t n_batch, const tsr_tensor* targets,
         size_t n_targets, std::span<const double> weights, const Losses& losses) {
    const std::shared_ptr<Pipeline> pipeline = object_of(handle, "pipeline");
    const auto& schedule = pipeline->schedule();
    std::vector<Tensor> inputs;
    std::vector<Tensor> goals;
    const auto refused = attempt([&] {
        if (losses.count > 0) required(losses.values, "losses");
        if (losses.values != nullptr && losses.count != static_cast<size_t>(schedule.microbatches)) {
            throw Error(Code::invalid_argument,
                        fmt::format("losses has room for {} numbers; there are {} micro-batches", losses.count,
                                    schedule.microbatches));
        }
        if (pipeline->has_stage(0)) inputs = tensors_in(batch, n_batch, "batch");
        if (pipeline->has_stage(schedule.stages() - 1)) {
            goals = tensors_in(targets, n_targets, "targets");
            if (!weights.empty()) required(weights.data(), "weights");
            if (weights.empty() && weights.data() != nullptr) {
                throw Error(Code::invalid_argument,
                            fmt::format("there are 0 weights for {} micro-batches", schedule.microbatches));
            }
        }
    });
    if (refused) pipeline->refuse(*refused);
    const auto found = (*pipeline.*pass)({inputs, goals, weights});
    if (losses.values != nullptr) std::ranges::copy(found, losses.values);
}

}  // namespace

extern "C" {

tsr_status tsr_pipeline_options_init(tsr_pipeline_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_pipeline_create(tsr_comm* comm, const int32_t* stages, size_t n, const tsr_pipeline_callbacks* callbacks,
                               const tsr_pipeline_options* options, tsr_pipeline** out) {
    return guard([&] {
        std::shared_ptr<const Trainer> trainer;
        const auto unreadable = attempt([&] {
            trainer = std::make_shared<Trainer>(
                options_in(&required(callbacks, "callbacks"), tsr_pipeline_callbacks{}, "callbacks"));
        });
        create(out, [&] {
            const auto& ranks = object_of(comm, "comm");
            const auto [own, core] = or_refuse_on_all_ranks(*ranks, Compared::pipelines, [&] {
                if (unreadable) throw Error(*unreadable);
                return std::pair(stages_in(stages, n), core_options(options));
            });
            return std::make_shared<Pipeline>(ranks, own, core, callbacks_of(trainer));
        });
    });
}

tsr_status tsr_pipeline_set_stream(tsr_pipeline* pipeline, void* stream) {
    return guard([&] { object_of(pipeline, "pipeline")->set_stream(stream); });
}

tsr_status tsr_pipeline_stages(const tsr_pipeline* pipeline, int32_t* stages) {
    return guard([&] { required(stages, "stages") = object_of(pipeline, "pipeline")->schedule().stages(); });
}

tsr_status tsr_pipeline_microbatches(const tsr_pipeline* pipeline, int32_t* microbatches) {
    return guard(
        [&] { required(microbatches, "microbatches") = object_of(pipeline, "pipeline")->schedule().microbatches; });
}

tsr_status tsr_pipeline_step(tsr_pipeline* pipeline, const tsr_tensor* batch, size_t n_batch, const tsr_tensor* targets,
                             size_t n_targets, const double* weights, size_t n_weights, double* losses,
                             size_t n_losses) {
    return guard([&] {
        run(pipeline, &Pipeline::step, batch, n_batch, targets, n_targets, {weights, n_weights}, {losses, n_losses});
    });
}

tsr_status tsr_pipeline_eval(tsr_pipeline* pipeline, const tsr_tensor* batch, size_t n_batch, const tsr_tensor* targets,
                             size_t n_targets, const double* weights, size_t n_weights, double* losses,
                             size_t n_losses) {
    return guard([&] {
        run(pipeline, &Pipeline::eval, batch, n_batch, targets, n_targets, {weights, n_weights}, {losses, n_losses});
    });
}

tsr_status tsr_pipeline_output(tsr_pipeline* pipeline, tsr_dtype dtype, const int64_t* shape, int32_t ndim,
                               tsr_tensor* tensor) {
    return guard([&] {
        const auto& object = object_of(pipeline, "pipeline");
        tsr_tensor& out = required(tensor, "tensor");
        if (ndim < 0 || ndim > TSR_MAX_NDIM) {
            throw Error(Code::invalid_argument,
                        fmt::format("the output has {} dimensions; 0 to {} are supported", ndim, TSR_MAX_NDIM));
        }
        if (ndim > 0) required(shape, "shape");
        out = tensor_out(object->output(static_cast<DType>(dtype), Dims(std::span(shape, static_cast<size_t>(ndim)))));
    });
}

tsr_status tsr_pipeline_loss(tsr_pipeline* pipeline, double loss) {
    return guard([&] { object_of(pipeline, "pipeline")->loss(loss); });
}

tsr_status tsr_pipeline_sum_tied(tsr_pipeline* pipeline, const tsr_tensor* gradient, const int32_t* stages, size_t n) {
    return guard([&] {
        const auto& object = object_of(pipeline, "pipeline");
        Tensor tensor;
        std::vector<int> tied;
        const auto refused = attempt([&] {
            tensor = tensor_in(gradient, "gradient");
            tied = stages_in(stages, n);
        });
        if (refused) object->refuse(*refused);
        object->sum_tied(tensor, tied);
    });
}

tsr_status tsr_pipeline_stats(tsr_pipeline* pipeline, tsr_pass_stats* stats) {
    return guard([&] {
        const pipeline::PipelineStats found = object_of(pipeline, "pipeline")->stats();
        const tsr_pass_stats values{.struct_size = sizeof(tsr_pass_stats),
                                    .wall_ns = found.wall.count(),
                                    .busy_ns = found.busy.count(),
                                    .waited_ns = found.waited.count(),
                                    .longest_ns = found.longest.count(),
                                    .longest_stage = found.longest_stage,
                                    .longest_rank = found.longest_rank,
                                    .peak_activations = found.peak_activations,
                                    .peak_bytes = found.peak_bytes};
        write_options(stats, required(stats, "stats").struct_size, &values, sizeof values, "stats");
    });
}

void tsr_pipeline_destroy(tsr_pipeline* pipeline) { destroy(pipeline); }

}  // extern "C"

}  // namespace tsr::capi
