#include "ckpt/elements.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "checkpoint/model/value.hpp"
#include "tensor/convert.hpp"

namespace tsr::cli {

namespace {

template <class T>
T load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
void widen_all(const std::byte* from, std::span<double> to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<double>(load<T>(from + i * sizeof(T)));
}

float of_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// A type without infinities: all exponents are of numbers; only the largest exponent with the largest fraction is NaN.
double of_f8_e4m3(uint8_t bits) {
    constexpr int bias = 7;
    const int exponent = bits >> 3 & 0xf;
    const int fraction = bits & 7;
    const double sign = (bits & 0x80) != 0 ? -1 : 1;
    if (exponent == 0xf && fraction == 7) return std::numeric_limits<double>::quiet_NaN();
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - 3);
    return sign * std::ldexp(8 + fraction, exponent - bias - 3);
}

// The upper half of an f16.
double of_f8_e5m2(uint8_t bits) {
    const auto half = static_cast<uint16_t>(bits << 8);
    double value = 0;
    convert(reinterpret_cast<const std::byte*>(&half), DType::f16, reinterpret_cast<std::byte*>(&value), DType::f64, 1);
    return value;
}

double of_f8_e8m0(uint8_t bits) {
    return bits == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, bits - 127);
}

template <double (*Convert)(uint8_t)>
void widen_bytes(const std::byte* from, std::span<double> to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] = Convert(static_cast<uint8_t>(from[i]));
}

std::array<double, 2> complex_at(const std::byte* from, DType dtype) {
    if (dtype == DType::c64) return {double{load<float>(from)}, double{load<float>(from + 4)}};
    return {load<double>(from), load<double>(from + 8)};
}

constexpr uint64_t middle_of_u64 = uint64_t{1} << 63;

Json integer_json(int64_t value, DType dtype) {
    if (dtype == DType::boolean) return value != 0;
    if (dtype == DType::u64) return static_cast<uint64_t>(value) ^ middle_of_u64;
    return value;
}

}  // namespace

bool is_integer(DType dtype) {
    switch (dtype) {
        case DType::i8:
        case DType::u8:
        case DType::i16:
        case DType::u16:
        case DType::i32:
        case DType::u32:
        case DType::i64:
        case DType::u64:
        case DType::boolean: return true;
        default: return false;
    }
}

bool is_complex(DType dtype) { return dtype == DType::c64 || dtype == DType::c128; }

int64_t integer_at(const std::byte* from, DType dtype) {
    switch (dtype) {
        case DType::i8: return load<int8_t>(from);
        case DType::u8: return load<uint8_t>(from);
        case DType::i16: return load<int16_t>(from);
        case DType::i32: return load<int32_t>(from);
        case DType::i64: return load<int64_t>(from);
        case DType::u16: return load<uint16_t>(from);
        case DType::u32: return load<uint32_t>(from);
        case DType::u64: return static_cast<int64_t>(load<uint64_t>(from) ^ middle_of_u64);
        default: return load<uint8_t>(from) != 0 ? 1 : 0;
    }
}

void widen(const std::byte* from, DType dtype, std::span<double> to) {
    switch (dtype) {
        case DType::f64: return widen_all<double>(from, to);
        case DType::f32: return widen_all<float>(from, to);
        case DType::bf16:
            for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<double>(of_bf16(load<uint16_t>(from + 2 * i)));
            return;
        case DType::f16:
            return convert(from, dtype, reinterpret_cast<std::byte*>(to.data()), DType::f64,
                           static_cast<int64_t>(to.size()));
        case DType::f8_e4m3: return widen_bytes<of_f8_e4m3>(from, to);
        case DType::f8_e5m2: return widen_bytes<of_f8_e5m2>(from, to);
        case DType::f8_e8m0: return widen_bytes<of_f8_e8m0>(from, to);
        case DType::u64: return widen_all<uint64_t>(from, to);
        case DType::c64:
        case DType::c128:
            for (size_t i = 0; i < to.size(); ++i) {
                const auto [real, imaginary] = complex_at(from + i * size_of(dtype), dtype);
                to[i] = std::hypot(real, imaginary);
            }
            return;
        default: {
            const size_t item = size_of(dtype);
            for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<double>(integer_at(from + i * item, dtype));
        }
    }
}

double gap_between(const std::byte* a, const std::byte* b, DType dtype) {
    if (is_integer(dtype)) {
        const int64_t x = integer_at(a, dtype);
        const int64_t y = integer_at(b, dtype);
        // Always exact: the difference of two integers fits into 64 unsigned bits.
        return static_cast<double>(x > y ? static_cast<uint64_t>(x) - static_cast<uint64_t>(y)
                                         : static_cast<uint64_t>(y) - static_cast<uint64_t>(x));
    }
    if (is_complex(dtype)) {
        const auto x = complex_at(a, dtype);
        const auto y = complex_at(b, dtype);
        return x == y ? 0 : std::hypot(x[0] - y[0], x[1] - y[1]);
    }
    double x = 0;
    double y = 0;
    widen(a, dtype, std::span(&x, 1));
    widen(b, dtype, std::span(&y, 1));
    return std::fabs(x - y);
}

Json element_json(const std::byte* from, DType dtype) {
    if (is_integer(dtype)) return integer_json(integer_at(from, dtype), dtype);
    if (is_complex(dtype)) {
        const auto [real, imaginary] = complex_at(from, dtype);
        return Json(Json::Array{double_value(real), double_value(imaginary)});
    }
    double value = 0;
    widen(from, dtype, std::span(&value, 1));
    return double_value(value);
}

std::string element_text(const std::byte* from, DType dtype) {
    if (is_integer(dtype)) return integer_json(integer_at(from, dtype), dtype).dump();
    if (is_complex(dtype)) {
        const auto [real, imaginary] = complex_at(from, dtype);
        return fmt::format("{:.6g}{:+.6g}i", real, imaginary);
    }
    double value = 0;
    widen(from, dtype, std::span(&value, 1));
    return number_text(value);
}

std::string with_point(std::string text) {
    if (text.find_first_of(".en") == std::string::npos) text += ".0";  // nan and inf have an n
    return text;
}

namespace {

// The fewest digits that are closer to the element than to its neighbours, whose bits are one less and one more.
std::string shortest(const std::byte* from, DType dtype) {
    double value = 0;
    widen(from, dtype, std::span(&value, 1));
    if (dtype == DType::f64) return fmt::format("{}", value);
    if (dtype == DType::f32) return fmt::format("{}", static_cast<float>(value));
    uint16_t bits = 0;
    std::memcpy(&bits, from, size_of(dtype));
    double margin = std::numeric_limits<double>::infinity();
    for (const int step : {-1, 1}) {
        const auto beside_bits = static_cast<uint16_t>(bits + step);
        double beside = 0;
        widen(reinterpret_cast<const std::byte*>(&beside_bits), dtype, std::span(&beside, 1));
        const double gap = std::fabs(beside - value) / 2;  // beside zero is a NaN, or a number of the other sign
        if (gap < margin) margin = gap;
    }
    for (int digits = 1; digits < 17; ++digits) {
        std::string text = fmt::format("{:.{}g}", value, digits);
        if (std::fabs(std::strtod(text.c_str(), nullptr) - value) < margin || !std::isfinite(value)) return text;
    }
    return fmt::format("{}", value);
}

}  // namespace

std::string exact_text(const std::byte* from, DType dtype) {
    if (is_integer(dtype)) return element_text(from, dtype);
    if (!is_complex(dtype)) return with_point(shortest(from, dtype));
    const DType half = dtype == DType::c64 ? DType::f32 : DType::f64;
    const std::string imaginary = shortest(from + size_of(half), half);
    return shortest(from, half) + (imaginary.starts_with('-') ? "" : "+") + imaginary + "i";
}

std::string number_text(double value) { return fmt::format("{:.6g}", value); }

void Statistics::add(const std::byte* data, int64_t count) {
    std::array<double, elements_at_once> values;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled below
    const size_t item = size_of(dtype_);
    for (int64_t begin = 0; begin < count; begin += static_cast<int64_t>(elements_at_once)) {
        const auto n = static_cast<size_t>(std::min(count - begin, static_cast<int64_t>(elements_at_once)));
        const std::byte* from = data + static_cast<size_t>(begin) * item;
        widen(from, dtype_, std::span(values).first(n));
        double sum = 0;
        double squares = 0;
        for (size_t i = 0; i < n; ++i) {
            const double value = values[i];
            ++count_;
            if (std::isnan(value)) {
                ++nan_;
                continue;
            }
            if (std::isinf(value)) {
                ++infinite_;
                continue;
            }
            if (value == 0) ++zero_;
            const bool is_first = finite() == 1;
            if (is_integer(dtype_)) {
                const int64_t integer = integer_at(from + i * item, dtype_);
                least_ = is_first ? integer : std::min(least_, integer);
                greatest_ = is_first ? integer : std::max(greatest_, integer);
            }
            min_ = is_first ? value : std::min(min_, value);
            max_ = is_first ? value : std::max(max_, value);
            if (dtype_ == DType::f64) {
                sum_ += static_cast<long double>(value);
                squares_ += static_cast<long double>(value) * static_cast<long double>(value);
            } else {
                sum += value;
                squares += value * value;
            }
        }
        sum_ += static_cast<long double>(sum);
        squares_ += static_cast<long double>(squares);
    }
}

Json Statistics::extreme(double value, int64_t integer) const {
    if (finite() == 0) return {};
    return is_integer(dtype_) ? integer_json(integer, dtype_) : double_value(value);
}

Json Statistics::min() const { return extreme(min_, least_); }
Json Statistics::max() const { return extreme(max_, greatest_); }

Json Statistics::mean() const {
    if (finite() == 0) return {};
    return double_value(static_cast<double>(sum_ / static_cast<long double>(finite())));
}

Json Statistics::norm() const {
    if (finite() == 0) return {};
    return double_value(static_cast<double>(std::sqrt(squares_)));
}

}  // namespace tsr::cli
