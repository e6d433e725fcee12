#include "optim/grad_scaler.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cfloat>

#include "base/error.hpp"

namespace tsr {

namespace {

// Losses are usually f32.
bool is_scale(double value) { return value >= FLT_MIN && value <= FLT_MAX; }

void check(const GradScalerOptions& options, const char* scale) {
    const auto refuse_unless = [](bool right, const char* name, auto value, const char* wanted) {
        if (!right) throw Error(Code::invalid_argument, fmt::format("{} is {}; it must be {}", name, value, wanted));
    };
    refuse_unless(is_scale(options.init_scale), scale, options.init_scale, "a positive normal f32 number");
    refuse_unless(options.growth_factor > 1 && is_scale(options.growth_factor), "growth_factor", options.growth_factor,
                  "finite and above 1");
    refuse_unless(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
                  "between 0 and 1");
    refuse_unless(options.growth_interval >= 1, "growth_interval", options.growth_interval, "at least 1");
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options), scale_(options.init_scale) {
    check(options, "init_scale");
}

GradScaler::Stage GradScaler::unscaled(const std::shared_ptr<Optimizer>& optimizer) {
    const auto known = stages_.find(optimizer);
    if (known != stages_.end()) return known->second;
    const bool finite = optimizer->unscale_grads(scale_);
    return stages_.emplace(optimizer, Stage{finite, false}).first->second;
}

void GradScaler::unscale(const std::shared_ptr<Optimizer>& optimizer) {
    if (const auto known = stages_.find(optimizer); known != stages_.end()) {
        throw Error(Code::invalid_state,
                    known->second.stepped
                        ? "this optimizer already stepped since the scaler's last update; call update() first"
                        : "this optimizer's gradients are already unscaled since the scaler's last update; "
                          "call update() first");
    }
    (void)unscaled(optimizer);
}

bool GradScaler::step(const std::shared_ptr<Optimizer>& optimizer) {
    if (const auto known = stages_.find(optimizer); known != stages_.end() && known->second.stepped) {
        throw Error(Code::invalid_state,
                    "this optimizer already stepped since the scaler's last update; call update() first");
    }
    optimizer->check_step();  // before it changes the gradients
    const Stage stage = unscaled(optimizer);
    if (stage.finite) optimizer->step();
    stages_.insert_or_assign(optimizer, Stage{stage.finite, true});
    return stage.finite;
}

void GradScaler::update() {
    if (stages_.empty()) {
        throw Error(Code::invalid_state,
                    "no gradients were unscaled since the scaler's last update; call step() or unscale() first");
    }
    const bool finite = std::ranges::all_of(stages_, [](const auto& each) { return each.second.finite; });
    stages_.clear();
    if (!finite) {
        scale_ = std::max(scale_ * options_.backoff_factor, static_cast<double>(FLT_MIN));
        tracker_ = 0;
    } else if (++tracker_ >= options_.growth_interval) {
        const double grown = scale_ * options_.growth_factor;
        if (is_scale(grown)) scale_ = grown;
        tracker_ = 0;
    }
}

Settings GradScaler::settings() const {
    return {{"scale", scale_},
            {"growth_factor", options_.growth_factor},
            {"backoff_factor", options_.backoff_factor},
            {"growth_interval", options_.growth_interval},
            {"_growth_tracker", tracker_}};
}

void GradScaler::load_settings(const Settings& settings) {
    const GradScalerOptions options{setting<double>(settings, "scale"), setting<double>(settings, "growth_factor"),
                                    setting<double>(settings, "backoff_factor"),
                                    setting<int64_t>(settings, "growth_interval")};
    check(options, "scale");
    const auto tracker = setting<int64_t>(settings, "_growth_tracker");
    if (tracker < 0) {
        throw Error(Code::invalid_argument, fmt::format("_growth_tracker is {}; it must not be negative", tracker));
    }
    options_ = options;
    scale_ = options.init_scale;
    tracker_ = tracker;
    stages_.clear();
}

}  // namespace tsr
