#include "tensor/convert.hpp"

#include <bit>
#include <cmath>
#include <cstring>

#include "base/error.hpp"

namespace tsr {

namespace {

// Splits a finite, non-zero magnitude into the nearest number of a format with `mantissa` stored bits and the given
// exponent range, by scaling and rounding to an integer; exact because double holds every intermediate.
uint64_t narrow(double value, int mantissa, int exponent_bits) {
    const uint64_t bits = std::bit_cast<uint64_t>(value);
    const uint64_t sign = (bits >> 63) << (mantissa + exponent_bits);
    const uint64_t infinity = ((uint64_t{1} << exponent_bits) - 1) << mantissa;
    if (std::isnan(value)) return sign | infinity | uint64_t{1} << (mantissa - 1);
    const double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return sign | infinity;
    if (magnitude == 0) return sign;
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
    return sign | (result >= infinity ? infinity : result);
}

double widen(uint64_t bits, int mantissa, int exponent_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const bool negative = (bits >> (mantissa + exponent_bits) & 1) != 0;
    const auto exponent = static_cast<int>(bits >> mantissa & ((uint64_t{1} << exponent_bits) - 1));
    const uint64_t fraction = bits & ((uint64_t{1} << mantissa) - 1);
    double value = 0;
    if (exponent == (1 << exponent_bits) - 1) {
        value = fraction != 0 ? std::nan("") : HUGE_VAL;
    } else if (exponent == 0) {
        value = std::scalbn(static_cast<double>(fraction), 1 - bias - mantissa);
    } else {
        value = std::scalbn(static_cast<double>(fraction + (uint64_t{1} << mantissa)), exponent - bias - mantissa);
    }
    return negative ? -value : value;
}

double load(const std::byte* from, DType dtype) {
    switch (dtype) {
        case DType::f64: {
            double value = 0;
            std::memcpy(&value, from, sizeof value);
            return value;
        }
        case DType::f32: {
            float value = 0;
            std::memcpy(&value, from, sizeof value);
            return static_cast<double>(value);
        }
        case DType::f16:
        case DType::bf16: {
            uint16_t bits = 0;
            std::memcpy(&bits, from, sizeof bits);
            return dtype == DType::f16 ? widen(bits, 10, 5) : widen(bits, 7, 8);
        }
        default: throw Error(Code::internal, "conversion of a dtype that is not floating");
    }
}

void store(double value, std::byte* to, DType dtype) {
    switch (dtype) {
        case DType::f64: std::memcpy(to, &value, sizeof value); return;
        case DType::f32: {
            const auto narrowed = static_cast<float>(value);
            std::memcpy(to, &narrowed, sizeof narrowed);
            return;
        }
        case DType::f16:
        case DType::bf16: {
            const auto bits = static_cast<uint16_t>(dtype == DType::f16 ? narrow(value, 10, 5) : narrow(value, 7, 8));
            std::memcpy(to, &bits, sizeof bits);
            return;
        }
        default: throw Error(Code::internal, "conversion to a dtype that is not floating");
    }
}

}  // namespace

void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count) {
    const size_t from_size = size_of(from_dtype);
    const size_t to_size = size_of(to_dtype);
    for (int64_t i = 0; i < count; ++i, from += from_size, to += to_size) store(load(from, from_dtype), to, to_dtype);
}

}  // namespace tsr
