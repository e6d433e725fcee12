// Conversion of f16 and bf16 to f32, which is exact, and back, rounded to nearest even. Uses integer arithmetic without
// branches on the data, so that the compiler vectorises loops; inlined into kernels that are compiled once per
// instruction set.
#pragma once

#include <bit>
#include <cstdint>

#include "base/vectors.hpp"

namespace tsr {

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};

TSR_INLINE float widen(BFloat value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

TSR_INLINE BFloat narrow_bfloat(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return {static_cast<uint16_t>(nan ? 0x7fc0 : rounded)};  // one NaN for all: see narrow_half
}

TSR_INLINE float widen(Half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
    // Normal numbers: move the exponent's bias from 15 to 127. Subnormals: let the unit normalise them by a
    // subtraction. Infinities and NaNs: an exponent of all ones.
    const uint32_t normal = magnitude + (uint32_t{112} << 23);
    const uint32_t special = magnitude | 0x7f800000 | (magnitude > (uint32_t{31} << 23) ? 0x400000 : 0);
    const float subnormal =
        std::bit_cast<float>(magnitude + (uint32_t{113} << 23)) - std::bit_cast<float>(uint32_t{113} << 23);
    const uint32_t exponent = magnitude & (uint32_t{31} << 23);
    const uint32_t finite = exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal;
    return std::bit_cast<float>(sign | (exponent == (uint32_t{31} << 23) ? special : finite));
}

TSR_INLINE Half narrow_half(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    // Subnormal results: adding 0.5 puts the last bit of a half's subnormal at the last bit of the float, and rounds.
    const uint32_t small =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - std::bit_cast<uint32_t>(0.5F);
    const uint32_t normal = (magnitude - (uint32_t{112} << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t result = magnitude < (uint32_t{113} << 23) ? small : normal;
    result = magnitude >= 0x47800000 ? 0x7c00 : result;  // 65536 and up; 65520 to there round up to infinity by itself
    // Which of two NaNs an addition propagates depends on the compiler's order of operands, which may differ between
    // the vector loop and its remainder. Using a single NaN keeps the bits the same.
    return {static_cast<uint16_t>(magnitude > 0x7f800000 ? 0x7e00 : sign | result)};
}

}  // namespace tsr
