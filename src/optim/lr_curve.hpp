// Learning rates as pure functions of the step, without a position (LrSchedule has one). Each is a closed form, so a run
// that resumes gets the bits of one that never stopped, and any step can be computed alone. Steps count from 0, the
// first step of the optimizer. Immutable, for any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tsr {

struct LrCurve {
    std::function<double(int64_t step, double base_lr)> lr;
    // Of SGD, or Adam's beta1; empty, or no value: the curve leaves it alone.
    std::function<std::optional<double>(int64_t step)> momentum;
    std::string text;         // kind and options; the same text is the same function
    bool scales_base = true;  // false: the curve sets the rate, whatever base_lr is
    int count = 1;            // it and all curves that it is composed of
    int depth = 1;
};
using LrCurvePtr = std::shared_ptr<const LrCurve>;

// Throw INVALID_ARGUMENT for a negative step, and if the result is not finite (or a momentum not below 1).
[[nodiscard]] double lr_at(const LrCurve& curve, int64_t step, double base_lr);
[[nodiscard]] std::optional<double> momentum_at(const LrCurve& curve, int64_t step);

// All of the following throw INVALID_ARGUMENT for options that are out of range.

// PyTorch's ConstantLR, LinearLR, StepLR, MultiStepLR, ExponentialLR, PolynomialLR, CosineAnnealingLR and
// CosineAnnealingWarmRestarts.
[[nodiscard]] LrCurvePtr constant_lr(double factor, int64_t total_steps);
[[nodiscard]] LrCurvePtr linear_lr(double start_factor, double end_factor, int64_t total_steps);
[[nodiscard]] LrCurvePtr step_decay_lr(int64_t step_size, double gamma);
[[nodiscard]] LrCurvePtr multi_step_decay_lr(std::span<const int64_t> milestones, double gamma);
[[nodiscard]] LrCurvePtr exponential_lr(double gamma);
[[nodiscard]] LrCurvePtr polynomial_lr(int64_t total_steps, double power);
[[nodiscard]] LrCurvePtr cosine_lr(int64_t total_steps, double min_lr);
[[nodiscard]] LrCurvePtr cosine_restarts_lr(int64_t first_steps, int64_t multiplier, double min_lr);

// Vaswani et al. 2017, with base_lr as the peak: min(s / w, sqrt(w / s)) for step number s, which they count from 1.
[[nodiscard]] LrCurvePtr inverse_sqrt_lr(int64_t warmup_steps);

// Warm-up, stable, decay (MiniCPM, Hu et al. 2024). After a share u of the decay it is at 1 - u, (1 + cos(pi u)) / 2, or
// 1 - sqrt(u) (Haegele et al. 2024). The warm-up begins and the decay ends at min_ratio.
enum class LrDecay { linear, cosine, sqrt };
struct WsdLrOptions {
    int64_t warmup_steps = 0;
    int64_t stable_steps = 0;
    int64_t decay_steps = 0;
    LrDecay decay = LrDecay::linear;
    double min_ratio = 0;
};
[[nodiscard]] LrCurvePtr wsd_lr(const WsdLrOptions& options);

// DeepSpeed's, with the names of its options. Its iteration number is the step minus 1: it begins with -1.
enum class LrWarmup { log, linear };
struct WarmupLrOptions {  // WarmupLR; with total_num_steps WarmupDecayLR
    double warmup_min_lr = 0;
    std::optional<double> warmup_max_lr{};  // none: base_lr
    int64_t warmup_num_steps = 1000;
    LrWarmup warmup_type = LrWarmup::log;
    int64_t total_num_steps = 0;  // 0: no decay
};
[[nodiscard]] LrCurvePtr warmup_lr(const WarmupLrOptions& options);

struct WarmupCosineLrOptions {
    int64_t total_num_steps = 0;
    double warmup_min_ratio = 0;
    int64_t warmup_num_steps = 1000;
    double cos_min_ratio = 1e-4;
    LrWarmup warmup_type = LrWarmup::log;
};
[[nodiscard]] LrCurvePtr warmup_cosine_lr(const WarmupCosineLrOptions& options);

struct OneCycleLrOptions {
    double cycle_min_lr = 0;
    double cycle_max_lr = 0;
    double decay_lr_rate = 0;
    int64_t cycle_first_step_size = 2000;
    std::optional<int64_t> cycle_second_step_size{};  // none: as the first
    int64_t cycle_first_stair_count = 0;              // 0: no stairs
    std::optional<int64_t> cycle_second_stair_count{};
    int64_t decay_step_size = 0;  // 0: nothing decays
    bool cycle_momentum = true;
    double cycle_min_mom = 0.8;
    double cycle_max_mom = 0.9;
    double decay_mom_rate = 0;
};
[[nodiscard]] LrCurvePtr one_cycle_lr(const OneCycleLrOptions& options);

[[nodiscard]] LrCurvePtr lr_range_test(double min_lr, int64_t step_size, double step_rate, bool staircase);

// Curves in a composition, counting those that they are composed of, and milestones.
inline constexpr size_t most_lr_parts = 1000;

// PyTorch's SequentialLR: curve i + 1 begins, with its step 0, at milestone i.
[[nodiscard]] LrCurvePtr sequential_lr(std::vector<LrCurvePtr> curves, std::span<const int64_t> milestones);
// PyTorch's ChainedScheduler: each curve takes the rate of the one before it as base_lr, so factors multiply.
[[nodiscard]] LrCurvePtr chained_lr(std::vector<LrCurvePtr> curves);

}  // namespace tsr
