// A DeepSpeed configuration (ds_config) as plain values. Every key of DeepSpeed's is honoured, refused with the reason, or
// reported as without effect; unknown keys are reported with the nearest known one. Pure: no ranks, no devices.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "comm/request.hpp"
#include "engine/batch.hpp"
#include "engine/config_section.hpp"
#include "engine/loss_scale.hpp"
#include "optim/adagrad.hpp"
#include "optim/adam.hpp"
#include "optim/lamb.hpp"
#include "optim/lion.hpp"
#include "optim/lr_curve.hpp"
#include "optim/sgd.hpp"

namespace tsr {

// The dtype in which a model is computed; its shards and its optimizer keep that of its parameters.
enum class Precision { of_params, f16, bf16 };

using OptimizerConfig = std::variant<AdamOptions, SgdOptions, AdagradOptions, LionOptions, LambOptions>;

// The optimizer or scheduler of a configuration as it is written.
struct PartConfig {
    std::string type;
    Json params;          // an object
    std::string refusal;  // why Tessera does not have it; empty: it has

    [[nodiscard]] bool is_own() const { return refusal.empty(); }
};

// Who makes an engine of a configuration. An engine of another library may have optimizers, schedulers and other things that
// Tessera's has not: they are no error, and not reported as without effect.
enum class ConfigReader { own, other };

// What a save does if ranks have different tags.
enum class TagValidation { ignore, warn, fail };

struct EngineConfig {
    BatchConfig batch;
    std::optional<PartConfig> optimizer_part;
    std::optional<OptimizerConfig> optimizer;  // if Tessera has it
    std::optional<PartConfig> scheduler_part;
    LrCurvePtr schedule;  // if Tessera has it

    int stage = 0;              // zero_optimization.stage: 0 nothing is sharded, 1 to 3
    int secondary_ranks = 1;    // zero_hpz_partition_size: each so many ranks keep parameters from forward to backward
    bool fills_missing = true;  // ignore_unused_parameters: a gradient that is not ready at the end of backward is zero

    ReduceOp op = ReduceOp::avg;
    bool prescales = false;  // gradients are divided by the number of ranks before they are summed
    double predivide = 1;    // or by this factor before, and by the rest after
    std::optional<DType>
        grad_dtype;  // in which gradients accumulate on a rank and are reduced; none: that of the parameters

    double gradient_clipping = 1;  // 0: off
    bool computes_norm = true;

    Precision precision = Precision::of_params;
    LossScaleOptions loss_scale;  // with f16
    bool skips_overflow = false;  // steps whose gradients have an infinity or NaN
    bool auto_casts = false;      // inputs to f16; for other readers

    bool every_step_is_boundary = false;  // managed_gradient_accumulation: false
    int64_t steps_per_print = 0;
    bool wall_clock_breakdown = false;
    bool dump_state = false;
    bool drops_last = false;                             // dataloader_drop_last; for other readers
    TagValidation tag_validation = TagValidation::warn;  // for other readers

    std::vector<ConfigReport> reports;

    // Gradients are sharded, so that each backward pass reduces them; otherwise only the last one before a step does.
    [[nodiscard]] bool reduces_each_pass() const { return stage >= 2; }

    // Throws INVALID_ARGUMENT for what is malformed or contradicts itself, UNSUPPORTED for what Tessera does not do. Messages
    // have the key, its line, its value and what to do.
    [[nodiscard]] static EngineConfig of(const ConfigText& text, ConfigReader reader = ConfigReader::own);
};

}  // namespace tsr
