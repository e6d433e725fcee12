#include "optim/clip.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace tsr {

namespace {

// Several independent sums: a single one would wait for each addition.
template <class T, class Term>
double sum_of(std::span<const T> values, Term&& term) {
    constexpr size_t lanes = 8;
    std::array<double, lanes> sums{};
    size_t i = 0;
    for (; i + lanes <= values.size(); i += lanes) {
        for (size_t k = 0; k < lanes; ++k) sums[k] += term(static_cast<double>(values[i + k]));
    }
    for (; i < values.size(); ++i) sums[0] += term(static_cast<double>(values[i]));
    double sum = 0;
    for (const double one : sums) sum += one;
    return sum;
}

template <class T>
double largest_of(std::span<const T> values) {
    T largest = 0;
    bool nan = false;
    for (const T value : values) {
        largest = std::max(largest, std::abs(value));
        nan |= value != value;
    }
    return nan ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(largest);
}

template <class T>
double power_sum_of(std::span<const T> values, double p) {
    if (std::isinf(p)) return largest_of(values);
    if (p == 1) return sum_of(values, [](double g) { return std::abs(g); });
    if (p == 2) return sum_of(values, [](double g) { return g * g; });
    return sum_of(values, [p](double g) { return std::pow(std::abs(g), p); });
}

// Optimizers update f32 and f64.
template <class Use>
void each_grad(const OptimizerParam& param, Use&& use) {
    if (param.grad.dtype == DType::f64) {
        use(param.grad.as<double>());
    } else {
        use(param.grad.as<float>());
    }
}

template <class Use>
void each_counted_grad(std::span<const OptimizerParam> params, Use&& use) {
    for (const OptimizerParam& param : params) {
        if (!param.counted || (param.held && param.held->replica != 0)) continue;
        each_grad(param, [&]<class T>(std::span<T> grad) { use(std::span<const T>(grad)); });
    }
}

}  // namespace

double power_sum(std::span<const OptimizerParam> params, double p) {
    double all = 0;
    each_counted_grad(params, [&]<class T>(std::span<const T> grad) {
        const double own = power_sum_of(grad, p);
        if (!std::isinf(p)) {
            all += own;
        } else if (!(own <= all)) {  // also NaN
            all = std::isnan(all) ? all : own;
        }
    });
    return all;
}

double power_sum_in(double unit, std::span<const OptimizerParam> params, double p) {
    double all = 0;
    each_counted_grad(params, [&]<class T>(std::span<const T> grad) {
        all += sum_of(grad, [&](double g) { return std::pow(std::abs(g) / unit, p); });
    });
    return all;
}

void scale_grads(std::span<const OptimizerParam> params, double factor) {
    for (const OptimizerParam& param : params) {
        each_grad(param, [&]<class T>(std::span<T> grad) {
            for (T& g : grad) g *= static_cast<T>(factor);
        });
    }
}

bool scale_grads_finitely(std::span<const OptimizerParam> params, double factor) {
    bool finite = true;
    for (const OptimizerParam& param : params) {
        each_grad(param, [&]<class T>(std::span<T> grad) {
            unsigned found = 0;  // branch-free, so that it is vectorised
            for (T& g : grad) {
                g *= static_cast<T>(factor);
                found |= static_cast<unsigned>(!(std::abs(g) <= std::numeric_limits<T>::max()));
            }
            finite = finite && found == 0;
        });
    }
    return finite;
}

void bound_grads(std::span<const OptimizerParam> params, double most) {
    for (const OptimizerParam& param : params) {
        each_grad(param, [&]<class T>(std::span<T> grad) {
            const auto bound = static_cast<T>(most);
            for (T& g : grad) g = g > bound ? bound : g < -bound ? -bound : g;  // NaN stays
        });
    }
}

}  // namespace tsr
