// Joins a number of each thread of a block into one, in an order that depends only on their number.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/thread.hpp"

namespace tsr::kernels {

// How two parts of a p-norm join: a sum, or for an infinite p the larger one, or NaN.
struct Power {
    double p;

    [[nodiscard]] TSR_HD double of(double value) const {
        const double magnitude = std::fabs(value);
        if (p == 2) return magnitude * magnitude;
        if (p == 1 || is_infinite()) return magnitude;
        return std::pow(magnitude, p);
    }
    [[nodiscard]] TSR_HD double join(double a, double b) const {
        if (!is_infinite()) return a + b;
        if (b <= a) return a;
        return a != a ? a : b;
    }

   private:
    [[nodiscard]] TSR_HD bool is_infinite() const { return p == std::numeric_limits<double>::infinity(); }
};

// Joins a number of each thread of a block in a fixed order, in phases 1 and 2 of a kernel.
template <unsigned threads>
struct BlockJoin {
    static constexpr unsigned group = 16;
    static_assert(threads % group == 0);
    double parts[threads];

    template <int phase>
    TSR_HD void run(const Thread& thread, Power power) {
        if constexpr (phase == 1) {
            if (thread.index < threads / group)
                parts[thread.index * group] = joined(thread.index * group, 1, group, power);
        } else {
            if (thread.index == 0) parts[0] = joined(0, group, threads / group, power);
        }
    }

   private:
    [[nodiscard]] TSR_HD double joined(unsigned begin, unsigned stride, unsigned count, Power power) const {
        double all = parts[begin];
        for (unsigned i = 1; i < count; ++i) all = power.join(all, parts[begin + i * stride]);
        return all;
    }
};

}  // namespace tsr::kernels
