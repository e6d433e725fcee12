#include "engine/config.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "engine/config_schedule.hpp"

namespace tsr {

namespace {

using Auto = ConfigSection::Auto;

struct Note {
    std::string_view key;
    std::string_view why;
};

std::string lower_case(std::string text) {
    std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
}

template <class T>
void take(T& into, const std::optional<T>& value) {
    if (value) into = *value;
}

void refuse_all(ConfigSection& section, std::span<const Note> notes) {
    for (const auto& [key, why] : notes) section.refuse(key, why);
}

bool is_enabled(ConfigSection& section) {
    section.refuse_auto("enabled");
    return section.flag("enabled").value_or(false);
}

std::optional<DType> dtype_in(ConfigSection& section, std::string_view key) {
    const std::optional<std::string> name = section.text(key);
    if (!name) return std::nullopt;
    if (*name == "fp32" || *name == "float32" || *name == "float") return DType::f32;
    if (*name == "fp16" || *name == "float16" || *name == "half") return DType::f16;
    if (*name == "bf16" || *name == "bfloat16") return DType::bf16;
    section.fail(key, Code::invalid_argument, "it must be \"fp32\", \"fp16\" or \"bf16\"");
}

// --- optimizer

void take_common(ConfigSection& params, double& lr, double& weight_decay) {
    params.refuse("maximize", "gradients are descended; negate the loss instead");
    take(lr, params.number("lr", 0));
    take(weight_decay, params.number("weight_decay", 0));
    constexpr std::string_view one_form = "Tessera's optimizers have one implementation per device";
    for (const std::string_view key : {"foreach", "fused", "capturable", "differentiable"}) {
        params.note_no_effect(key, one_form);
    }
}

void take_betas(ConfigSection& params, double& beta1, double& beta2) {
    const Json* const betas = params.value("betas");
    if (betas == nullptr) return;
    const auto is_beta = [](const Json& beta) {
        const bool is_number = beta.is(Json::Kind::number) || beta.is(Json::Kind::int64);
        return is_number && beta.as_double() >= 0 && beta.as_double() < 1;
    };
    if (!betas->is(Json::Kind::array) || betas->as_array().size() != 2 ||
        !std::ranges::all_of(betas->as_array(), is_beta)) {
        params.fail("betas", Code::invalid_argument, "it must be two numbers of at least 0 and below 1");
    }
    beta1 = betas->as_array()[0].as_double();
    beta2 = betas->as_array()[1].as_double();
}

AdamOptions adam_of(ConfigSection& params, bool is_adamw) {
    AdamOptions options;
    options.decay = Decay::decoupled;
    const std::optional<bool> decoupled = params.flag("adam_w_mode");
    if (is_adamw) {
        params.note_no_effect("adam_w_mode", "AdamW always decays weights decoupled");
    } else if (decoupled == false) {
        options.decay = Decay::in_gradient;
    }
    const bool torch_adam = params.flag("torch_adam").value_or(false);
    params.note_no_effect("torch_adam", "Tessera's Adam has PyTorch's formulas");
    // The default of the implementation that DeepSpeed would take.
    if (torch_adam && options.decay == Decay::decoupled) options.weight_decay = 0.01;
    take_common(params, options.lr, options.weight_decay);
    take(options.eps, params.number("eps", 0));
    params.refuse("amsgrad", "Tessera's Adam has no amsgrad; set it to false");
    if (params.flag("bias_correction") == false) {
        params.fail("bias_correction", Code::unsupported, "Tessera's Adam corrects its moments; leave it out");
    }
    take_betas(params, options.beta1, options.beta2);
    return options;
}

SgdOptions sgd_of(ConfigSection& params) {
    SgdOptions options;
    take_common(params, options.lr, options.weight_decay);
    take(options.momentum, params.number("momentum", 0));
    take(options.dampening, params.number("dampening", 0));
    take(options.nesterov, params.flag("nesterov"));
    if (options.nesterov && (options.momentum <= 0 || options.dampening != 0)) {
        params.fail("nesterov", Code::invalid_argument, "it needs a \"momentum\" above 0 and a \"dampening\" of 0");
    }
    return options;
}

AdagradOptions adagrad_of(ConfigSection& params) {
    AdagradOptions options;
    take_common(params, options.lr, options.weight_decay);
    take(options.lr_decay, params.number("lr_decay", 0));
    take(options.initial_accumulator_value, params.number("initial_accumulator_value", 0));
    take(options.eps, params.number("eps", 0));
    return options;
}

LionOptions lion_of(ConfigSection& params) {
    LionOptions options;
    take_common(params, options.lr, options.weight_decay);
    take_betas(params, options.beta1, options.beta2);
    return options;
}

LambOptions lamb_of(ConfigSection& params) {
    LambOptions options;
    take_common(params, options.lr, options.weight_decay);
    take_betas(params, options.beta1, options.beta2);
    take(options.eps, params.number("eps", 0));
    take(options.bias_correction, params.flag("bias_correction"));
    take(options.max_coeff, params.number("max_coeff", 0));
    take(options.min_coeff, params.number("min_coeff", 0));
    if (options.min_coeff > options.max_coeff) {
        params.fail("min_coeff", Code::invalid_argument, "it must be at most \"max_coeff\", which is 10 by default");
    }
    params.refuse("amsgrad", "Lamb has no amsgrad; set it to false");
    params.refuse("eps_inside_sqrt", "Tessera's Lamb adds eps to the square root; set it to false");
    return options;
}

// Reads the part of a configuration that Tessera's engine makes by `read`, which throws UNSUPPORTED for what it does not have.
template <class Read>
void read_part(PartConfig& part, EngineConfig& config, ConfigReader reader, Read&& read) {
    const size_t reported = config.reports.size();
    try {
        read();
    } catch (const Error& error) {
        if (reader == ConfigReader::own || error.code() != Code::unsupported) throw;
        part.refusal = error.what();
    }
    if (reader == ConfigReader::other) config.reports.resize(reported);
}

PartConfig& part_in(std::optional<PartConfig>& part, ConfigSection& section, const ConfigSection& params) {
    const std::optional<std::string> type = section.text("type");
    if (!type) section.fail("type", Code::invalid_argument, "name one");
    return part.emplace(PartConfig{*type, params.object(), {}});
}

// For another implementation of an optimizer, such as "FusedAdam"; `type` is in lower case.
std::string meant_by(std::string type) {
    std::erase(type, '_');
    for (const char* name : {"AdamW", "Adam", "Adagrad", "Lion", "Lamb", "SGD"}) {
        for (const char* library : {"fused", "cpu", "deepspeedcpu", "torch"}) {
            if (type == library + lower_case(name)) return fmt::format("; did you mean \"{}\"?", name);
        }
    }
    return {};
}

void take_optimizer(ConfigSection& top, EngineConfig& config, ConfigReader reader) {
    auto section = top.section("optimizer", Auto::is_refused);
    if (!section) return;
    ConfigSection params = section->section_or_empty("params", Auto::is_refused);
    PartConfig& part = part_in(config.optimizer_part, *section, params);
    params.refuse("max_grad_norm",
                  "it is not a parameter of optimizers; set \"gradient_clipping\" at the top level instead");
    read_part(part, config, reader, [&] {
        const std::string name = lower_case(part.type);
        if (name == "adam" || name == "adamw") {
            config.optimizer = adam_of(params, name == "adamw");
        } else if (name == "sgd") {
            config.optimizer = sgd_of(params);
        } else if (name == "adagrad") {
            config.optimizer = adagrad_of(params);
        } else if (name == "lion") {
            config.optimizer = lion_of(params);
        } else if (name == "lamb") {
            config.optimizer = lamb_of(params);
        } else {
            section->fail(
                "type", Code::unsupported,
                fmt::format("Tessera's engine has Adam, AdamW, SGD, Adagrad, Lion and Lamb; choose one of them{}",
                            meant_by(name)));
        }
        params.finish();
    });
    section->note_no_effect("legacy_fusion", "there is one implementation per device");
    section->finish();
}

void take_scheduler(ConfigSection& top, EngineConfig& config, ConfigReader reader) {
    auto section = top.section("scheduler", Auto::is_refused);
    if (!section || section->object().as_object().empty()) return;
    ConfigSection params = section->section_or_empty("params", Auto::is_refused);
    PartConfig& part = part_in(config.scheduler_part, *section, params);
    AdamOptions* adam = config.optimizer ? std::get_if<AdamOptions>(&*config.optimizer) : nullptr;
    read_part(part, config, reader, [&] {
        config.schedule = schedule_of(*section, part.type, params, adam != nullptr || reader == ConfigReader::other);
        params.finish();
    });
    if (adam != nullptr && config.schedule && config.schedule->momentum) adam->beta2 = 0.99;  // as DeepSpeed's OneCycle
    section->finish();
}

// --- precision

void take_fp16(ConfigSection& top, EngineConfig& config, ConfigReader reader) {
    auto section = top.section("fp16");
    if (!section) return;
    if (is_enabled(*section)) {
        config.precision = Precision::f16;
        config.skips_overflow = true;
    }
    LossScaleOptions& scale = config.loss_scale;
    take(scale.fixed, section->number("loss_scale"));
    if (scale.fixed != 0 && !is_normal_f32(scale.fixed)) {
        section->fail("loss_scale", Code::invalid_argument, "it must be 0 (dynamic) or a positive normal f32 number");
    }
    const int64_t power = section->integer("initial_scale_power", 0).value_or(16);
    if (power > 127) {
        section->fail("initial_scale_power", Code::invalid_argument,
                      "2 to this power must be an f32 number: at most 127");
    }
    scale.initial = std::ldexp(1.0, static_cast<int>(power));
    take(scale.window, section->integer("loss_scale_window", 1));
    take(scale.hysteresis, section->integer("hysteresis", 1));
    take(scale.restores_every_step, section->flag("consecutive_hysteresis"));
    take(scale.minimum, section->number("min_loss_scale"));
    if (!is_normal_f32(scale.minimum)) {
        section->fail("min_loss_scale", Code::invalid_argument, "it must be a positive normal f32 number");
    }
    if (scale.fixed == 0 && scale.minimum > scale.initial) {
        section->fail(
            "min_loss_scale", Code::invalid_argument,
            fmt::format("the loss scale begins at 2 to the power of \"initial_scale_power\", {}; give at most "
                        "this",
                        scale.initial));
    }
    take(config.auto_casts, section->flag("auto_cast"));
    if (reader == ConfigReader::own) section->note_no_effect_if_on("auto_cast", "inputs are converted by the program");
    section->refuse("fp16_master_weights_and_grads", "optimizers update f32 and f64 only; set it to false");
    section->finish();
}

void take_bf16(ConfigSection& top, EngineConfig& config) {
    const bool has_both = top.value("bf16") != nullptr && top.value("bfloat16") != nullptr;
    if (has_both) top.fail("bfloat16", Code::invalid_argument, "it is another name of \"bf16\"; remove one of the two");
    auto section = top.section(top.value("bfloat16") != nullptr ? "bfloat16" : "bf16");
    if (!section) return;
    const bool checks = section->flag("check_grad_overflow").value_or(true);
    if (is_enabled(*section)) {
        if (config.precision == Precision::f16) {
            section->fail(
                "enabled", Code::invalid_argument,
                "\"fp16.enabled\" is true as well; a model has one of the two precisions, so disable the other");
        }
        config.precision = Precision::bf16;
        config.skips_overflow = checks;
    }
    section->note_no_effect("immediate_grad_update", "gradients are reduced as soon as they are ready");
    section->refuse("bf16_master_weights_and_grads", "optimizers update f32 and f64 only; set it to false");
    section->refuse("bf16_optimizer_states",
                    "optimizers keep their moments in the dtype of the parameters; set it to false");
    section->finish();
}

// The dtype of gradients has two names: they are reduced in the one in which they accumulate.
void take_grad_dtype(ConfigSection& top, EngineConfig& config) {
    config.grad_dtype = dtype_in(top, "communication_data_type");
    auto section = top.section("data_types");
    if (!section) return;
    const std::optional<DType> accumulated = dtype_in(*section, "grad_accum_dtype");
    if (accumulated && config.grad_dtype.value_or(*accumulated) != *accumulated) {
        section->fail(
            "grad_accum_dtype", Code::unsupported,
            "gradients are reduced in the dtype in which they accumulate; set \"communication_data_type\" to the "
            "same, or leave one of them out");
    }
    if (accumulated) config.grad_dtype = accumulated;
    section->finish();
}

// --- zero_optimization

constexpr std::string_view of_units = "memory and prefetching follow from the units of the model";
constexpr std::string_view always_so = "Tessera always works this way or needs no such setting";
constexpr std::string_view in_saves = "checkpoints are complete in every layout and load at any stage and world size";

constexpr std::array zero_notes{
    Note{"contiguous_gradients", always_so},
    Note{"reduce_scatter", always_so},
    Note{"reduce_bucket_size", of_units},
    Note{"allgather_partitions", always_so},
    Note{"allgather_bucket_size", of_units},
    Note{"overlap_comm", "reductions always overlap with the backward pass"},
    Note{"use_multi_rank_bucket_allreduce", always_so},
    Note{"load_from_fp32_weights", in_saves},
    Note{"elastic_checkpoint", in_saves},
    Note{"sub_group_size", of_units},
    Note{"round_robin_gradients", of_units},
    Note{"legacy_stage1", always_so},
    Note{"parameter_alignment", "parameters are aligned to 64 bytes"},
    Note{"stage3_prefetch_bucket_size", of_units},
    Note{"stage3_param_persistence_threshold", of_units},
    Note{"stage3_model_persistence_threshold", of_units},
    Note{"stage3_max_live_parameters", of_units},
    Note{"stage3_max_reuse_distance", of_units},
    Note{"stage3_gather_16bit_weights_on_model_save", in_saves},
    Note{"stage3_gather_fp16_weights_on_model_save", in_saves},
    Note{"stage3_module_granularity_threshold", of_units},
    Note{"memory_efficient_linear", "layers are the program's"},
};

constexpr std::string_view quantised = "Tessera does not quantise what it communicates; set it to false";
constexpr std::array zero_refused{
    Note{"zero_quantized_weights", quantised},
    Note{"zero_quantized_gradients", quantised},
    Note{"zero_quantized_nontrainable_weights", quantised},
    Note{"zeropp_loco_param", "it belongs to quantised gradients, which Tessera does not have; remove it"},
    Note{"mics_shard_size", "the engine shards over all ranks; use FSDP with shard_ranks"},
    Note{"mics_hierarchical_params_gather", "it belongs to MiCS, which the engine does not have; remove it"},
};

constexpr std::string_view offload_why = "parameters, gradients and moments are in the memory of the CPU already";

void take_offload(ConfigSection& zero, std::string_view key) {
    auto section = zero.section(key);
    if (!section) return;
    const std::string device = section->text("device").value_or("none");
    if (device == "nvme") {
        section->fail("device", Code::unsupported, "Tessera does not offload to files; use \"cpu\" or \"none\"");
    }
    if (device != "cpu" && device != "none") {
        section->fail("device", Code::invalid_argument, "it must be \"none\" or \"cpu\"");
    }
    if (device == "cpu") section->note_no_effect("device", offload_why);
    for (const std::string_view other : {"nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory",
                                         "pipeline_read", "pipeline_write", "fast_init", "ratio"}) {
        section->note_no_effect(other, offload_why);
    }
    section->finish();
}

void take_stage(ConfigSection& zero, EngineConfig& config) {
    zero.refuse_auto("stage");
    const int64_t stage = zero.integer("stage", 0).value_or(0);
    if (stage > 3) zero.fail("stage", Code::invalid_argument, "stages are 0 to 3");
    config.stage = static_cast<int>(stage);
    const int64_t secondary = zero.integer("zero_hpz_partition_size", 1).value_or(1);
    if (secondary > 4096) zero.fail("zero_hpz_partition_size", Code::invalid_argument, "it must be at most 4096");
    if (stage == 3) {
        config.secondary_ranks = static_cast<int>(secondary);
    } else if (secondary > 1) {
        zero.note_no_effect("zero_hpz_partition_size",
                            "only stage 3 shards the parameters between forward and backward");
    }
    config.computes_norm = zero.flag("compute_grad_norm").value_or(true);
    if (config.computes_norm) return;
    if (stage != 1 && stage != 2) {
        zero.fail("compute_grad_norm", Code::invalid_argument, "it can be false at stages 1 and 2 only");
    }
    if (config.gradient_clipping > 0) {
        zero.fail(
            "compute_grad_norm", Code::invalid_argument,
            fmt::format("gradients are clipped by their norm; set \"gradient_clipping\" to 0 (it is {}), or leave this "
                        "out",
                        config.gradient_clipping));
    }
}

void take_zero(ConfigSection& top, EngineConfig& config) {
    const Json* value = top.value("zero_optimization");
    if (value == nullptr) return;
    if (value->is(Json::Kind::boolean)) {
        config.stage = value->as_bool() ? 1 : 0;
        return top.note_deprecated("zero_optimization",
                                   fmt::format("write {{\"stage\": {}}}, which it means", config.stage));
    }
    ConfigSection zero = *top.section("zero_optimization");
    take_stage(zero, config);
    config.fills_missing = zero.flag("ignore_unused_parameters").value_or(true);
    take_offload(zero, "offload_param");
    take_offload(zero, "offload_optimizer");
    for (const std::string_view key : {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}) {
        if (zero.flag(key)) zero.note_deprecated(key, fmt::format("it has no effect: {}", offload_why));
    }
    refuse_all(zero, zero_refused);
    for (const auto& [key, why] : zero_notes) zero.note_no_effect(key, why);
    zero.finish();
}

// --- the rest of the top level

constexpr std::string_view is_off_now = "the engine does not have it; remove it";
constexpr std::array top_refused{
    Note{"amp", "use \"fp16\" or \"bf16\""},
    Note{"torch_autocast", "the casts of operations are PyTorch's; use \"fp16\" or \"bf16\""},
    Note{"nebula", "save checkpoints with a Saver; remove it"},
    Note{"compression_training", is_off_now},
    Note{"quantize_training", is_off_now},
    Note{"weight_quantization", is_off_now},
    Note{"sparse_gradients", "gradients are dense; set it to false"},
    Note{"sparse_attention", is_off_now},
    Note{"eigenvalue", is_off_now},
    Note{"elasticity", "the launcher restarts jobs at other world sizes (tessera run); remove it"},
    Note{"graph_harvesting", is_off_now},
    Note{"curriculum_learning", "data is the program's; remove it"},
    Note{"data_efficiency", "data is the program's; remove it"},
    Note{"progressive_layer_drop", "layers are the program's; remove it"},
    Note{"hybrid_engine", is_off_now},
    Note{"autotuning", is_off_now},
    Note{"tensor_parallel", "make a tensor-parallel model with TensorParallel; remove it"},
};

constexpr std::string_view own_saver = "a Saver saves the model and the optimizer, with its own options";
constexpr std::string_view own_pipeline = "a Pipeline has its own options";
constexpr std::string_view not_measured =
    "the engine does not measure it; tessera trace shows operations and their times";
constexpr std::string_view not_written = "the program writes its own records; the engine has the numbers";
constexpr std::array top_notes{
    Note{"memory_breakdown", not_measured},
    Note{"flops_profiler", not_measured},
    Note{"comms_logger", not_measured},
    Note{"tensorboard", not_written},
    Note{"wandb", not_written},
    Note{"comet", not_written},
    Note{"csv_monitor", not_written},
    Note{"seq_parallel_communication_data_type", "the engine has no sequence parallelism"},
    Note{"disable_allgather", always_so},
    Note{"zero_allow_untested_optimizer", "the engine creates its optimizer"},
    Note{"zero_force_ds_cpu_optimizer", "the engine creates its optimizer"},
    Note{"activation_checkpointing", "recomputation of activations is the program's"},
    Note{"allgather_size", of_units},
    Note{"aio", "Tessera does not offload to files"},
    Note{"compile", "compilation is the program's"},
    Note{"pipeline", own_pipeline},
};

void take_batch(ConfigSection& top, EngineConfig& config) {
    config.batch.train = top.integer("train_batch_size");
    config.batch.micro = top.integer("train_micro_batch_size_per_gpu");
    config.batch.accumulation = top.integer("gradient_accumulation_steps");
    config.every_step_is_boundary = !top.flag("managed_gradient_accumulation").value_or(true);
}

void take_reduction(ConfigSection& top, EngineConfig& config) {
    take(config.prescales, top.flag("prescale_gradients"));
    take(config.predivide, top.number("gradient_predivide_factor"));
    if (!is_normal_f32(config.predivide)) {
        top.fail("gradient_predivide_factor", Code::invalid_argument, "it must be a positive normal f32 number");
    }
    const std::string op = top.text("gradient_allreduce_op").value_or("mean");
    if (op == "mean") return;
    if (op != "sum") top.fail("gradient_allreduce_op", Code::invalid_argument, "it must be \"mean\" or \"sum\"");
    config.op = ReduceOp::sum;
    if (config.stage == 3) {
        top.fail("gradient_allreduce_op", Code::invalid_argument, "stage 3 averages gradients; use \"mean\"");
    }
    if (config.prescales) {
        top.fail("gradient_allreduce_op", Code::invalid_argument,
                 "\"prescale_gradients\" divides by the number of ranks; use one of the two");
    }
}

void take_checkpoint(ConfigSection& top, EngineConfig& config, ConfigReader reader) {
    auto section = top.section("checkpoint");
    if (!section) return;
    const std::string validation = lower_case(section->text("tag_validation").value_or("warn"));
    if (validation == "ignore") {
        config.tag_validation = TagValidation::ignore;
    } else if (validation == "fail") {
        config.tag_validation = TagValidation::fail;
    } else if (validation != "warn") {
        section->fail("tag_validation", Code::invalid_argument, "it must be \"Ignore\", \"Warn\" or \"Fail\"");
    }
    if (reader == ConfigReader::own) section->note_no_effect("tag_validation", own_saver);
    for (const std::string_view key : {"load_universal", "use_node_local_storage", "parallel_write"}) {
        section->note_no_effect(key, own_saver);
    }
    section->finish();
}

void take_output(ConfigSection& top, EngineConfig& config, ConfigReader reader) {
    take(config.steps_per_print, top.integer("steps_per_print", 0));
    take(config.dump_state, top.flag("dump_state"));
    take(config.wall_clock_breakdown, top.flag("wall_clock_breakdown"));
    if (config.steps_per_print == 0) {
        top.note_no_effect_if_on("wall_clock_breakdown",
                                 "the times are printed with \"steps_per_print\"; set that too");
    }
    take(config.drops_last, top.flag("dataloader_drop_last"));
    if (reader == ConfigReader::own) {
        top.note_no_effect_if_on("dataloader_drop_last", "the program has its own data loader");
    }
}

}  // namespace

EngineConfig EngineConfig::of(const ConfigText& text, ConfigReader reader) {
    EngineConfig config;
    ConfigSection top(text, text.root(), "", Auto::is_refused, config.reports);
    take_batch(top, config);
    take_optimizer(top, config, reader);
    take_scheduler(top, config, reader);
    take(config.gradient_clipping, top.number("gradient_clipping", 0));
    take_fp16(top, config, reader);
    take_bf16(top, config);
    take_zero(top, config);
    take_reduction(top, config);
    take_grad_dtype(top, config);
    take_checkpoint(top, config, reader);
    take_output(top, config, reader);
    refuse_all(top, top_refused);
    for (const auto& [key, why] : top_notes) top.note_no_effect_if_on(key, why);
    top.finish();
    return config;
}

}  // namespace tsr
