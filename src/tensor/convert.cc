#include "tensor/convert.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/error.hpp"
#include "tensor/half.hpp"

namespace tsr {

namespace {

// The nearest number to a double in a format with `mantissa` stored bits and the given exponent range. Going through
// f32 would round twice, so it scales and rounds to an integer, which is exact because double represents every
// intermediate.
uint16_t narrow(double value, int mantissa, int exponent_bits) {
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

// f16 and bf16 go through f32, which has all of either.
TSR_INLINE float wide(Half value) { return widen(value); }
TSR_INLINE float wide(BFloat value) { return widen(value); }
TSR_INLINE float wide(float value) { return value; }
TSR_INLINE double wide(double value) { return value; }

template <class To, class From>
TSR_INLINE To converted(From value) {
    if constexpr (std::is_same_v<To, Half>) return narrow_half(wide(value));
    if constexpr (std::is_same_v<To, BFloat>) return narrow_bfloat(wide(value));
    if constexpr (std::is_floating_point_v<To>) return static_cast<To>(wide(value));
}
template <>
inline Half converted<Half>(double value) {
    return {narrow(value, 10, 5)};
}
template <>
inline BFloat converted<BFloat>(double value) {
    return {narrow(value, 7, 8)};
}

template <class From, class To>
TSR_INLINE void loop(const std::byte* __restrict from, std::byte* __restrict to, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        From value;
        std::memcpy(&value, from + i * sizeof(From), sizeof value);
        const To out = converted<To>(value);
        std::memcpy(to + i * sizeof(To), &out, sizeof out);
    }
}

template <class From, class To>
void plain_loop(const std::byte* from, std::byte* to, size_t count) {
    loop<From, To>(from, to, count);
}

#if defined(__x86_64__)
template <class From, class To>
[[gnu::target("avx2")]] void avx2_loop(const std::byte* from, std::byte* to, size_t count) {
    loop<From, To>(from, to, count);
}
template <class From, class To>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] void avx512_loop(const std::byte* from,
                                                                                               std::byte* to,
                                                                                               size_t count) {
    loop<From, To>(from, to, count);
}
#endif

template <class From, class To>
void convert(const std::byte* from, std::byte* to, size_t count, [[maybe_unused]] Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return avx512_loop<From, To>(from, to, count);
    if (vectors == Vectors::avx2) return avx2_loop<From, To>(from, to, count);
#endif
    plain_loop<From, To>(from, to, count);
}

template <class From>
void convert_to(const std::byte* from, std::byte* to, DType dtype, size_t count, Vectors vectors) {
    switch (dtype) {
        case DType::f16: return convert<From, Half>(from, to, count, vectors);
        case DType::bf16: return convert<From, BFloat>(from, to, count, vectors);
        case DType::f32: return convert<From, float>(from, to, count, vectors);
        case DType::f64: return convert<From, double>(from, to, count, vectors);
        default: throw Error(Code::internal, "cannot convert to a dtype that is not floating point");
    }
}

}  // namespace

void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count, Vectors vectors) {
    const auto n = static_cast<size_t>(count);
    if (from_dtype == to_dtype) {
        if (n > 0) std::memcpy(to, from, n * size_of(from_dtype));
        return;
    }
    switch (from_dtype) {
        case DType::f16: return convert_to<Half>(from, to, to_dtype, n, vectors);
        case DType::bf16: return convert_to<BFloat>(from, to, to_dtype, n, vectors);
        case DType::f32: return convert_to<float>(from, to, to_dtype, n, vectors);
        case DType::f64: return convert_to<double>(from, to, to_dtype, n, vectors);
        default: throw Error(Code::internal, "cannot convert from a dtype that is not floating point");
    }
}

}  // namespace tsr
