#include "engine/config_schedule.hpp"

#include <optional>
#include <string_view>

#include "base/error.hpp"

namespace tsr {

namespace {

template <class T>
void take(T& into, const std::optional<T>& value) {
    if (value) into = *value;
}

template <class T>
T required(const ConfigSection& params, std::string_view key, const std::optional<T>& value) {
    if (!value) params.fail(key, Code::invalid_argument, "the schedule has no default for it; give a value");
    return *value;
}

LrWarmup warmup_type_in(ConfigSection& params) {
    const std::string type = params.text("warmup_type").value_or("log");
    if (type == "log") return LrWarmup::log;
    if (type == "linear") return LrWarmup::linear;
    params.fail("warmup_type", Code::invalid_argument, "it must be \"log\" or \"linear\"");
}

WarmupLrOptions warmup_in(ConfigSection& params) {
    WarmupLrOptions options;
    take(options.warmup_min_lr, params.number("warmup_min_lr", 0));
    options.warmup_max_lr = params.number("warmup_max_lr", 0);
    take(options.warmup_num_steps, params.integer("warmup_num_steps"));
    options.warmup_type = warmup_type_in(params);
    return options;
}

WarmupLrOptions warmup_decay_in(ConfigSection& params) {
    WarmupLrOptions options = warmup_in(params);
    if (!options.warmup_max_lr) options.warmup_max_lr = 0.001;
    options.total_num_steps = required(params, "total_num_steps", params.integer("total_num_steps", 1));
    return options;
}

WarmupCosineLrOptions warmup_cosine_in(ConfigSection& params) {
    WarmupCosineLrOptions options;
    options.total_num_steps = required(params, "total_num_steps", params.integer("total_num_steps", 1));
    take(options.warmup_min_ratio, params.number("warmup_min_ratio", 0));
    take(options.warmup_num_steps, params.integer("warmup_num_steps"));
    take(options.cos_min_ratio, params.number("cos_min_ratio", 0));
    options.warmup_type = warmup_type_in(params);
    return options;
}

OneCycleLrOptions one_cycle_in(ConfigSection& params, bool cycles_momentum) {
    OneCycleLrOptions options;
    options.cycle_min_lr = required(params, "cycle_min_lr", params.number("cycle_min_lr", 0));
    options.cycle_max_lr = required(params, "cycle_max_lr", params.number("cycle_max_lr", 0));
    take(options.decay_lr_rate, params.number("decay_lr_rate", 0));
    take(options.cycle_first_step_size, params.integer("cycle_first_step_size"));
    options.cycle_second_step_size = params.integer("cycle_second_step_size");
    take(options.cycle_first_stair_count, params.integer("cycle_first_stair_count"));
    options.cycle_second_stair_count = params.integer("cycle_second_stair_count");
    take(options.decay_step_size, params.integer("decay_step_size"));
    take(options.cycle_momentum, params.flag("cycle_momentum"));
    take(options.cycle_min_mom, params.number("cycle_min_mom", 0));
    take(options.cycle_max_mom, params.number("cycle_max_mom", 0));
    take(options.decay_mom_rate, params.number("decay_mom_rate", 0));
    if (!cycles_momentum) {
        options.cycle_momentum = false;
        params.note_no_effect_if_on("cycle_momentum", "it is for optimizers with \"betas\", such as Adam");
    }
    return options;
}

// The curve from `make`, whose refusals do not know the configuration.
template <class Make>
LrCurvePtr checked(const ConfigSection& scheduler, Make&& make) {
    try {
        return make();
    } catch (const Error& error) {
        scheduler.fail("params", error.code(), error.what());
    }
}

LrCurvePtr range_test_in(const ConfigSection& scheduler, ConfigSection& params) {
    const double min_lr = params.number("lr_range_test_min_lr", 0).value_or(1e-3);
    const int64_t step_size = params.integer("lr_range_test_step_size").value_or(2000);
    const double step_rate = params.number("lr_range_test_step_rate", 0).value_or(1);
    const bool staircase = params.flag("lr_range_test_staircase").value_or(false);
    return checked(scheduler, [&] { return lr_range_test(min_lr, step_size, step_rate, staircase); });
}

LrCurvePtr curve_in(const ConfigSection& scheduler, const std::string& type, ConfigSection& params,
                    bool cycles_momentum) {
    const auto along = [&](auto make, const auto& options) {
        return checked(scheduler, [&] { return make(options); });
    };
    if (type == "WarmupLR") return along(warmup_lr, warmup_in(params));
    if (type == "WarmupDecayLR") return along(warmup_lr, warmup_decay_in(params));
    if (type == "WarmupCosineLR") return along(warmup_cosine_lr, warmup_cosine_in(params));
    if (type == "OneCycle") return along(one_cycle_lr, one_cycle_in(params, cycles_momentum));
    if (type == "LRRangeTest") return range_test_in(scheduler, params);
    scheduler.fail("type", Code::unsupported,
                   "Tessera's engine has WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest; choose one "
                   "of them, or give the engine a schedule of Tessera's");
}

}  // namespace

LrCurvePtr schedule_of(const ConfigSection& scheduler, const std::string& type, ConfigSection& params,
                       bool cycles_momentum) {
    if (params.integer("last_batch_iteration").value_or(-1) != -1) {
        params.fail("last_batch_iteration", Code::unsupported,
                    "the position of a schedule comes from a checkpoint; leave it out");
    }
    return curve_in(scheduler, type, params, cycles_momentum);
}

}  // namespace tsr
