// The schedules of PyTorch and of papers, and what composes them.
#include "optim/lr_curve.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numbers>
#include <utility>

#include "optim/lr_checks.hpp"

namespace tsr {

namespace {

constexpr int64_t most_steps = std::numeric_limits<int64_t>::max();
constexpr int most_depth = 16;  // which bounds the stack that a curve needs

template <class Lr>
LrCurvePtr made(std::string text, Lr lr) {
    return std::make_shared<const LrCurve>(LrCurve{.lr = std::move(lr), .momentum = {}, .text = std::move(text)});
}

double ratio(int64_t steps, int64_t of) { return static_cast<double>(steps) / static_cast<double>(of); }

// From 1 to 0 while `u` goes from 0 to 1.
double half_cosine(double u) { return (1 + std::cos(std::numbers::pi * u)) / 2; }

void check_milestones(std::span<const int64_t> milestones, const char* order, auto&& in_order) {
    if (milestones.size() > most_lr_parts) {
        throw Error(Code::invalid_argument,
                    fmt::format("there are {} milestones; at most {} are allowed", milestones.size(), most_lr_parts));
    }
    for (size_t i = 0; i < milestones.size(); ++i) {
        if (milestones[i] >= 1 && (i == 0 || in_order(milestones[i - 1], milestones[i]))) continue;
        throw Error(Code::invalid_argument,
                    fmt::format("milestone {} is {}; milestones must be at least 1 and {}", i, milestones[i], order));
    }
}

std::string texts_of(const std::vector<LrCurvePtr>& curves) {
    std::vector<std::string_view> texts;
    for (const LrCurvePtr& each : curves) texts.emplace_back(each->text);
    return fmt::format("{}", fmt::join(texts, ", "));
}

// What a composition has of its curves besides their values.
LrCurve composed(const char* kind, const std::vector<LrCurvePtr>& curves) {
    refuse_unless(!curves.empty(), "the number of schedules", curves.size(), "at least 1");
    LrCurve whole;
    size_t count = 0;
    for (const LrCurvePtr& each : curves) {
        count += static_cast<size_t>(each->count);
        whole.depth = std::max(whole.depth, each->depth + 1);
        if (count > most_lr_parts) {
            throw Error(Code::invalid_argument, fmt::format("the {} schedule has more than {} schedules, counting all "
                                                            "that they are composed of",
                                                            kind, most_lr_parts));
        }
    }
    if (whole.depth > most_depth) {
        throw Error(Code::invalid_argument, fmt::format("the {} schedule is nested {} deep; at most {} are allowed",
                                                        kind, whole.depth, most_depth));
    }
    whole.count = static_cast<int>(count + 1);
    return whole;
}

bool has_momentum(const LrCurvePtr& curve) { return static_cast<bool>(curve->momentum); }

}  // namespace

double lr_at(const LrCurve& curve, int64_t step, double base_lr) {
    refuse_unless(step >= 0, "the step", step, "at least 0");
    check_not_negative("base_lr", base_lr);
    const double lr = curve.lr(step, base_lr);
    if (std::isfinite(lr)) return lr;
    throw Error(Code::invalid_argument,
                fmt::format("the learning rate of {} would be {} at step {}", curve.text, lr, step));
}

std::optional<double> momentum_at(const LrCurve& curve, int64_t step) {
    refuse_unless(step >= 0, "the step", step, "at least 0");
    const std::optional<double> momentum = curve.momentum ? curve.momentum(step) : std::nullopt;
    if (!momentum || *momentum < 1) return momentum;
    throw Error(Code::invalid_argument,
                fmt::format("the momentum of {} would be {} at step {}, but it must stay below 1; lower decay_mom_rate",
                            curve.text, *momentum, step));
}

LrCurvePtr constant_lr(double factor, int64_t total_steps) {
    check_not_negative("factor", factor);
    check_steps("total_steps", total_steps);
    return made(fmt::format("constant(factor={}, total_steps={})", factor, total_steps),
                [=](int64_t step, double base) { return step < total_steps ? base * factor : base; });
}

LrCurvePtr linear_lr(double start_factor, double end_factor, int64_t total_steps) {
    check_not_negative("start_factor", start_factor);
    check_not_negative("end_factor", end_factor);
    check_steps("total_steps", total_steps);
    return made(
        fmt::format("linear(start_factor={}, end_factor={}, total_steps={})", start_factor, end_factor, total_steps),
        [=](int64_t step, double base) {
            const double done = ratio(std::min(step, total_steps), total_steps);
            return base * (start_factor + (end_factor - start_factor) * done);
        });
}

LrCurvePtr step_decay_lr(int64_t step_size, double gamma) {
    check_steps("step_size", step_size);
    check_not_negative("gamma", gamma);
    return made(fmt::format("step_decay(step_size={}, gamma={})", step_size, gamma), [=](int64_t step, double base) {
        return base * std::pow(gamma, static_cast<double>(step / step_size));
    });
}

LrCurvePtr multi_step_decay_lr(std::span<const int64_t> milestones, double gamma) {
    refuse_unless(!milestones.empty(), "the number of milestones", milestones.size(), "at least 1");
    check_milestones(milestones, "in ascending order", std::less_equal<>());
    check_not_negative("gamma", gamma);
    return made(fmt::format("multi_step_decay(milestones=[{}], gamma={})", fmt::join(milestones, ", "), gamma),
                [=, at = std::vector(milestones.begin(), milestones.end())](int64_t step, double base) {
                    const auto passed = std::distance(at.begin(), std::ranges::upper_bound(at, step));
                    return base * std::pow(gamma, static_cast<double>(passed));
                });
}

LrCurvePtr exponential_lr(double gamma) {
    check_not_negative("gamma", gamma);
    return made(fmt::format("exponential(gamma={})", gamma),
                [=](int64_t step, double base) { return base * std::pow(gamma, static_cast<double>(step)); });
}

LrCurvePtr polynomial_lr(int64_t total_steps, double power) {
    check_steps("total_steps", total_steps);
    check_not_negative("power", power);
    return made(fmt::format("polynomial(total_steps={}, power={})", total_steps, power),
                [=](int64_t step, double base) {
                    return base * std::pow(1 - ratio(std::min(step, total_steps), total_steps), power);
                });
}

LrCurvePtr cosine_lr(int64_t total_steps, double min_lr) {
    check_steps("total_steps", total_steps);
    check_not_negative("min_lr", min_lr);
    return made(fmt::format("cosine(total_steps={}, min_lr={})", total_steps, min_lr), [=](int64_t step, double base) {
        const double down = half_cosine(ratio(step % total_steps, total_steps));
        const bool rises = step / total_steps % 2 == 1;
        return min_lr + (base - min_lr) * (rises ? 1 - down : down);
    });
}

LrCurvePtr cosine_restarts_lr(int64_t first_steps, int64_t multiplier, double min_lr) {
    check_steps("first_steps", first_steps);
    check_steps("multiplier", multiplier);
    check_not_negative("min_lr", min_lr);
    return made(
        fmt::format("cosine_restarts(first_steps={}, multiplier={}, min_lr={})", first_steps, multiplier, min_lr),
        [=](int64_t step, double base) {
            double cycle = static_cast<double>(first_steps);
            if (multiplier == 1) {
                step %= first_steps;
            } else {
                int64_t steps = first_steps;
                while (step >= steps) {
                    step -= steps;
                    cycle *= static_cast<double>(multiplier);
                    if (steps > most_steps / multiplier) break;  // longer than any number of steps
                    steps *= multiplier;
                }
            }
            return min_lr + (base - min_lr) * half_cosine(static_cast<double>(step) / cycle);
        });
}

LrCurvePtr inverse_sqrt_lr(int64_t warmup_steps) {
    check_steps("warmup_steps", warmup_steps);
    return made(fmt::format("inverse_sqrt(warmup_steps={})", warmup_steps), [=](int64_t step, double base) {
        const double number = static_cast<double>(step) + 1;
        const double warmup = static_cast<double>(warmup_steps);
        return base * std::min(number / warmup, std::sqrt(warmup / number));
    });
}

LrCurvePtr wsd_lr(const WsdLrOptions& o) {
    for (const auto& [name, steps] :
         {std::pair{"warmup_steps", o.warmup_steps}, std::pair{"stable_steps", o.stable_steps}}) {
        refuse_unless(steps >= 0, name, steps, "at least 0");
    }
    check_steps("decay_steps", o.decay_steps);
    check_not_negative("min_ratio", o.min_ratio);
    if (o.warmup_steps > most_steps - o.stable_steps) {
        throw Error(Code::invalid_argument,
                    fmt::format("warmup_steps {} and stable_steps {} have no sum", o.warmup_steps, o.stable_steps));
    }
    const char* shape = o.decay == LrDecay::linear ? "linear" : o.decay == LrDecay::cosine ? "cosine" : "sqrt";
    return made(fmt::format("wsd(warmup_steps={}, stable_steps={}, decay_steps={}, decay={}, min_ratio={})",
                            o.warmup_steps, o.stable_steps, o.decay_steps, shape, o.min_ratio),
                [=](int64_t step, double base) {
                    const auto above = [&](double share) { return base * (o.min_ratio + (1 - o.min_ratio) * share); };
                    if (step < o.warmup_steps) return above(ratio(step, o.warmup_steps));
                    const int64_t decays = o.warmup_steps + o.stable_steps;
                    if (step < decays) return base;
                    const double u = ratio(std::min(step - decays, o.decay_steps), o.decay_steps);
                    if (o.decay == LrDecay::linear) return above(1 - u);
                    return above(o.decay == LrDecay::cosine ? half_cosine(u) : 1 - std::sqrt(u));
                });
}

LrCurvePtr sequential_lr(std::vector<LrCurvePtr> curves, std::span<const int64_t> milestones) {
    LrCurve whole = composed("sequential", curves);
    if (milestones.size() + 1 != curves.size()) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} milestones do not separate {} schedules; there must be one less", milestones.size(),
                                curves.size()));
    }
    check_milestones(milestones, "in strictly ascending order", std::less<>());
    whole.text = fmt::format("sequential([{}], milestones=[{}])", texts_of(curves), fmt::join(milestones, ", "));
    whole.scales_base = std::ranges::all_of(curves, [](const LrCurvePtr& each) { return each->scales_base; });
    const bool any_momentum = std::ranges::any_of(curves, has_momentum);
    // The curve of a step, and its own step.
    const auto find = [curves = std::move(curves),
                       milestones = std::vector(milestones.begin(), milestones.end())](int64_t step) {
        const auto index = std::distance(milestones.begin(), std::ranges::upper_bound(milestones, step));
        const int64_t begin = index == 0 ? 0 : milestones[static_cast<size_t>(index - 1)];
        return std::pair<const LrCurve&, int64_t>(*curves[static_cast<size_t>(index)], step - begin);
    };
    whole.lr = [find](int64_t step, double base) {
        const auto [current, own_step] = find(step);
        return current.lr(own_step, base);
    };
    if (any_momentum) {
        whole.momentum = [find](int64_t step) {
            const auto [current, own_step] = find(step);
            return current.momentum ? current.momentum(own_step) : std::nullopt;
        };
    }
    return std::make_shared<const LrCurve>(std::move(whole));
}

LrCurvePtr chained_lr(std::vector<LrCurvePtr> curves) {
    LrCurve whole = composed("chained", curves);
    for (size_t i = 1; i < curves.size(); ++i) {
        if (curves[i]->scales_base) continue;
        throw Error(
            Code::invalid_argument,
            fmt::format("schedule {} of the chain, {}, sets the learning rate and would ignore those before it; put "
                        "it first",
                        i, curves[i]->text));
    }
    whole.text = fmt::format("chained([{}])", texts_of(curves));
    whole.scales_base = curves.front()->scales_base;
    whole.momentum = curves.front()->momentum;  // only a curve that sets the rate has one
    whole.lr = [curves = std::move(curves)](int64_t step, double base) {
        for (const LrCurvePtr& each : curves) base = each->lr(step, base);
        return base;
    };
    return std::make_shared<const LrCurve>(std::move(whole));
}

}  // namespace tsr
