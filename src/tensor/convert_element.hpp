// The conversion of one element between floating-point dtypes (tensor/convert.hpp says how it rounds), for the loops of the
// CPU and for kernels of devices.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/vectors.hpp"
#include "tensor/half.hpp"

namespace tsr {

// The nearest number to a double in a format with `mantissa` stored bits and the given exponent range. Going through
// f32 would round twice, so it scales and rounds to an integer, which is exact because double represents every
// intermediate.
TSR_HD inline uint16_t narrow(double value, int mantissa, int exponent_bits) {
    const uint64_t bits = std::bit_cast<uint64_t>(value);
    const uint64_t sign = (bits >> 63) << (mantissa + exponent_bits);
    const uint64_t infinity = ((uint64_t{1} << exponent_bits) - 1) << mantissa;
    if (std::isnan(value)) return static_cast<uint16_t>(infinity | uint64_t{1} << (mantissa - 1));
    const double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinity);
    if (magnitude == 0) return static_cast<uint16_t>(sign);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = std::ilogb(magnitude);
    if (exponent < 1 - bias) exponent = 1 - bias;  // subnormal: a fixed scale
    const double scaled = std::scalbn(magnitude, mantissa - exponent);
    auto integer = static_cast<uint64_t>(scaled);
    const double rest = scaled - static_cast<double>(integer);
    if (rest > 0.5 || (rest == 0.5 && (integer & 1) != 0)) ++integer;
    // A carry into the exponent adds up by itself; below 2^mantissa it is a subnormal with exponent field 0.
    const uint64_t field = integer >> mantissa == 0 ? 0 : static_cast<uint64_t>(exponent + bias - 1) << mantissa;
    const uint64_t result = field + integer;
    return static_cast<uint16_t>(sign | (result >= infinity ? infinity : result));
}

// The dtype in which arithmetic with an element is done: f16 and bf16 go through f32, which has all of either.
TSR_INLINE float wide(Half value) { return widen(value); }
TSR_INLINE float wide(BFloat value) { return widen(value); }
TSR_INLINE float wide(float value) { return value; }
TSR_INLINE double wide(double value) { return value; }

template <class To, class From>
TSR_INLINE To converted(From value) {
    if constexpr (std::is_same_v<To, From>) {
        return value;
    } else if constexpr (std::is_floating_point_v<To>) {
        return static_cast<To>(wide(value));
    } else if constexpr (std::is_same_v<To, Half>) {
        if constexpr (std::is_same_v<From, double>) {
            return {narrow(value, 10, 5)};
        } else {
            return narrow_half(wide(value));
        }
    } else if constexpr (std::is_same_v<From, double>) {
        return {narrow(value, 7, 8)};
    } else {
        return narrow_bfloat(wide(value));
    }
}

}  // namespace tsr
