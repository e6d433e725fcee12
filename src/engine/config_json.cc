#include "engine/config_json.hpp"

#include <initializer_list>
#include <utility>

namespace tsr {

namespace {

Json object(std::initializer_list<Json::Member> members) { return Json(Json::Object(members)); }

Json of_part(const std::optional<PartConfig>& part) {
    if (!part) return {};
    return object({{"type", part->type}, {"params", part->params}, {"core", part->is_own()}});
}

const char* name_of(Precision precision) {
    switch (precision) {
        case Precision::f16: return "fp16";
        case Precision::bf16: return "bf16";
        case Precision::of_params: break;
    }
    return "params";
}

Json of_dtype(const std::optional<DType>& dtype) {
    if (!dtype) return {};
    return *dtype == DType::f32 ? "fp32" : *dtype == DType::f16 ? "fp16" : "bf16";
}

const char* name_of(TagValidation validation) {
    switch (validation) {
        case TagValidation::ignore: return "Ignore";
        case TagValidation::fail: return "Fail";
        case TagValidation::warn: break;
    }
    return "Warn";
}

const char* name_of(ReportKind kind) {
    switch (kind) {
        case ReportKind::unknown: return "unknown";
        case ReportKind::deprecated: return "deprecated";
        case ReportKind::no_effect: break;
    }
    return "no_effect";
}

Json of_fp16(const EngineConfig& config) {
    const LossScaleOptions& scale = config.loss_scale;
    return object({{"auto_cast", config.auto_casts},
                   {"loss_scale", scale.fixed},
                   {"initial_scale", scale.initial},
                   {"loss_scale_window", scale.window},
                   {"hysteresis", scale.hysteresis},
                   {"consecutive_hysteresis", scale.restores_every_step},
                   {"min_loss_scale", scale.minimum}});
}

Json of_reports(const std::vector<ConfigReport>& reports) {
    Json::Array list;
    for (const ConfigReport& report : reports) {
        list.push_back(object({{"key", report.key}, {"kind", name_of(report.kind)}, {"text", report.text}}));
    }
    return Json(std::move(list));
}

}  // namespace

Json to_json(const EngineConfig& config, const BatchSizes& batch, int ranks) {
    return object({{"ranks", ranks},
                   {"train_batch_size", batch.train},
                   {"train_micro_batch_size_per_gpu", batch.micro},
                   {"gradient_accumulation_steps", batch.accumulation},
                   {"managed_gradient_accumulation", !config.every_step_is_boundary},
                   {"optimizer", of_part(config.optimizer_part)},
                   {"scheduler", of_part(config.scheduler_part)},
                   {"gradient_clipping", config.gradient_clipping},
                   {"precision", name_of(config.precision)},
                   {"fp16", of_fp16(config)},
                   {"skips_overflow", config.skips_overflow},
                   {"zero_optimization", object({{"stage", config.stage},
                                                 {"zero_hpz_partition_size", config.secondary_ranks},
                                                 {"ignore_unused_parameters", config.fills_missing},
                                                 {"compute_grad_norm", config.computes_norm}})},
                   {"communication_data_type", of_dtype(config.grad_dtype)},
                   {"gradient_allreduce_op", config.op == ReduceOp::sum ? "sum" : "mean"},
                   {"prescale_gradients", config.prescales},
                   {"gradient_predivide_factor", config.predivide},
                   {"steps_per_print", config.steps_per_print},
                   {"wall_clock_breakdown", config.wall_clock_breakdown},
                   {"dump_state", config.dump_state},
                   {"dataloader_drop_last", config.drops_last},
                   {"checkpoint", object({{"tag_validation", name_of(config.tag_validation)}})},
                   {"reports", of_reports(config.reports)}});
}

}  // namespace tsr
