#include "optim/lamb.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>

#include "base/error.hpp"
#include "base/exact_sums.hpp"
#include "base/refuse.hpp"
#include "optim/kernels.hpp"

namespace tsr {

namespace {

constexpr std::array<std::string_view, 3> moment_names{"exp_avg", "exp_avg_sq", step_moment};

std::vector<OptimizerParam> allowed(std::vector<OptimizerParam> params, const std::shared_ptr<SharedCopy>& copy) {
    if (copy) {
        throw Error(Code::unsupported,
                    "Lamb needs the norms of full parameters, but with share_params each rank updates a part of them; "
                    "create the model without share_params, or use another optimizer");
    }
    for (const OptimizerParam& param : params) {
        if (param.value.device.type == DeviceType::cpu) continue;
        throw Error(
            Code::unsupported,
            fmt::format("parameter \"{}\" is on a CUDA device; Lamb updates parameters on the CPU only: use another "
                        "optimizer, such as AdamW",
                        param.name));
    }
    return params;
}

void check(const LambOptions& options) {
    check_betas({options.beta1, options.beta2});
    check_not_negative("eps", options.eps);
    check_not_negative("weight_decay", options.weight_decay);
    check_not_negative("max_coeff", options.max_coeff);
    check_not_negative("min_coeff", options.min_coeff);
    if (options.min_coeff > options.max_coeff) {
        refuse("min_coeff is {}; it must be at most max_coeff, {}", options.min_coeff, options.max_coeff);
    }
}

template <class T>
LambStep<T> prepared(const LambOptions& options) {
    return {static_cast<T>(options.beta1),     static_cast<T>(1 - options.beta1), static_cast<T>(options.beta2),
            static_cast<T>(1 - options.beta2), static_cast<T>(options.eps),       static_cast<T>(options.weight_decay)};
}

double step_size(const LambOptions& options, double lr, int64_t step) {
    if (!options.bias_correction) return lr;
    const double bias_correction1 = 1 - std::pow(options.beta1, static_cast<double>(step));
    const double bias_correction2 = 1 - std::pow(options.beta2, static_cast<double>(step));
    return lr * std::sqrt(bias_correction2) / bias_correction1;
}

// What is summed up for each parameter.
struct Norms {
    static constexpr size_t sums = 3;

    ExactSums& all;
    size_t first;

    [[nodiscard]] size_t weights() const { return first; }  // squares of the parameter
    [[nodiscard]] size_t directions() const { return first + 1; }
    void add_infinite() const { all.add(first + 2, 1); }  // a square that is not finite
    [[nodiscard]] bool is_finite() const { return all.value(first + 2) == 0; }
};

// Adds up squares in one sum. That of a float is a whole number below 2^48 times a power of 2 that its exponent gives, so
// there is a sum for each exponent; two of them, so that an addition need not wait for the one before.
class Squares {
   public:
    Squares(const Norms& norms, size_t sum) : norms_(norms), sum_(sum) {}

    void add(std::span<const float> values) {
        constexpr size_t most = 1 << 14;  // 2^15 squares are below 2^63
        while (!values.empty()) {
            const std::span<const float> some = values.first(std::min(values.size(), most));
            size_t i = 0;
            for (; i + 1 < some.size(); i += 2) {
                add_to(bins_[0], some[i]);
                add_to(bins_[1], some[i + 1]);
            }
            if (i < some.size()) add_to(bins_[0], some[i]);
            pending_ += some.size();
            if (pending_ >= most) flush();
            values = values.subspan(some.size());
        }
    }
    void add(std::span<const double> values) {
        for (const double value : values) {
            const double square = value * value;
            std::isfinite(square) ? norms_.all.add(sum_, square) : norms_.add_infinite();
        }
    }
    void flush() {
        for (auto& bins : bins_) {
            if (bins[infinite] != 0) norms_.add_infinite();
            for (int e = 0; e < infinite; ++e) {
                const uint64_t sum = bins[static_cast<size_t>(e)];
                if (sum == 0) continue;
                const int power = 2 * std::max(e, 1) - 300;  // of the squares' last bit
                norms_.all.add(sum_, std::ldexp(static_cast<double>(sum & 0xffffffff), power));
                norms_.all.add(sum_, std::ldexp(static_cast<double>(sum >> 32), power + 32));
            }
            bins.fill(0);
        }
        pending_ = 0;
    }

   private:
    static constexpr int infinite = 255;  // the exponent of infinities and NaN
    using Bins = std::array<uint64_t, 256>;

    static void add_to(Bins& bins, float value) {
        const auto bits = std::bit_cast<uint32_t>(value);
        const uint32_t exponent = (bits >> 23) & 255;
        const uint64_t mantissa = (bits & 0x7fffff) | (uint32_t{exponent != 0} << 23);
        bins[exponent] += mantissa * mantissa;
    }

    const Norms& norms_;
    size_t sum_;
    std::array<Bins, 2> bins_{};
    size_t pending_ = 0;
};

template <class T>
struct Part {
    T* param;
    const T* grad;
    T* exp_avg;
    T* exp_avg_sq;
    size_t count;
};

template <class T>
void add_norms(const Norms& norms, const Part<T>& part, const LambStep<T>& step) {
    constexpr size_t block = 1024;
    std::array<T, block> directions;
    Squares of_weights(norms, norms.weights());
    Squares of_directions(norms, norms.directions());
    for (size_t begin = 0; begin < part.count; begin += block) {
        const size_t count = std::min(block, part.count - begin);
        lamb_directions(part.param + begin, part.grad + begin, part.exp_avg + begin, part.exp_avg_sq + begin,
                        directions.data(), count, step);
        of_weights.add(std::span<const T>(part.param + begin, count));
        of_directions.add(std::span<const T>(directions.data(), count));
    }
    of_weights.flush();
    of_directions.flush();
}

// Of NaN and infinities it is NaN, which the parameter then shows.
double trust_ratio(const Norms& norms, const LambOptions& options) {
    if (!norms.is_finite()) return std::numeric_limits<double>::quiet_NaN();
    const double weights = std::sqrt(norms.all.value(norms.weights()));
    const double directions = std::sqrt(norms.all.value(norms.directions()));
    if (weights == 0 || directions == 0) return 1;
    return std::clamp(weights / directions, options.min_coeff, options.max_coeff);
}

}  // namespace

Lamb::Lamb(std::vector<OptimizerParam> params, const LambOptions& options, const std::shared_ptr<SharedCopy>& copy)
    : Optimizer(allowed(std::move(params), copy), options.lr, moment_names, nullptr), options_(options) {
    check(options);
}

void Lamb::update(int64_t step, std::span<const ParamSlice> slices) {
    const auto in_float = prepared<float>(options_);
    const auto in_double = prepared<double>(options_);
    const double size = step_size(options_, lr(), step);
    const auto with_part = [&](const ParamSlice& slice, auto&& use) {
        const auto of = [&]<class T>(const LambStep<T>& prepared_step) {
            use(Part<T>{reinterpret_cast<T*>(value_data(slice)), reinterpret_cast<const T*>(slice.grad),
                        reinterpret_cast<T*>(moment_data(slice, 0)), reinterpret_cast<T*>(moment_data(slice, 1)),
                        slice.count},
                prepared_step);
        };
        params()[slice.param].value.dtype == DType::f32 ? of(in_float) : of(in_double);
    };

    ExactSums sums(slices.size() * Norms::sums);
    const auto norms = [&](size_t i) { return Norms{sums, i * Norms::sums}; };
    for (size_t i = 0; i < slices.size(); ++i) {
        if (!is_first_holder(params()[slices[i].param])) continue;
        with_part(slices[i],
                  [&](const auto& part, const auto& prepared_step) { add_norms(norms(i), part, prepared_step); });
    }
    join_sums(sums);
    for (size_t i = 0; i < slices.size(); ++i) {
        before_write(slices[i].param);
        const double rate = size * trust_ratio(norms(i), options_);
        with_part(slices[i], [&]<class T>(const Part<T>& part, const LambStep<T>& prepared_step) {
            lamb_update(part.param, part.grad, part.exp_avg, part.exp_avg_sq, part.count, prepared_step,
                        static_cast<T>(rate));
        });
    }
}

Settings Lamb::own_settings() const {
    return {{"betas", std::vector<double>{options_.beta1, options_.beta2}},
            {"eps", options_.eps},
            {"weight_decay", options_.weight_decay},
            {"bias_correction", options_.bias_correction},
            {"max_coeff", options_.max_coeff},
            {"min_coeff", options_.min_coeff}};
}

void Lamb::load_own_settings(const Settings& settings) {
    LambOptions loaded = options_;
    std::tie(loaded.beta1, loaded.beta2) = betas_in(settings);
    loaded.eps = setting<double>(settings, "eps");
    loaded.weight_decay = setting<double>(settings, "weight_decay");
    loaded.bias_correction = setting<bool>(settings, "bias_correction");
    loaded.max_coeff = setting<double>(settings, "max_coeff");
    loaded.min_coeff = setting<double>(settings, "min_coeff");
    check(loaded);
    options_ = loaded;
}

}  // namespace tsr
