#include "ckpt/elements.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "checkpoint/value.hpp"
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

}  // namespace

int64_t integer_at(const std::byte* from, DType dtype) {
    switch (dtype) {
        case DType::i8: return load<int8_t>(from);
        case DType::u8: return load<uint8_t>(from);
        case DType::i16: return load<int16_t>(from);
        case DType::i32: return load<int32_t>(from);
        case DType::i64: return load<int64_t>(from);
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
        default: {
            const size_t item = size_of(dtype);
            for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<double>(integer_at(from + i * item, dtype));
        }
    }
}

Json element_json(const std::byte* from, DType dtype) {
    if (dtype == DType::boolean) return integer_at(from, dtype) != 0;
    if (!is_floating(dtype)) return integer_at(from, dtype);
    double value = 0;
    widen(from, dtype, std::span(&value, 1));
    return double_value(value);
}

std::string element_text(const std::byte* from, DType dtype) {
    if (dtype == DType::boolean) return integer_at(from, dtype) != 0 ? "true" : "false";
    if (!is_floating(dtype)) return std::to_string(integer_at(from, dtype));
    double value = 0;
    widen(from, dtype, std::span(&value, 1));
    return number_text(value);
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
            if (!is_floating(dtype_)) {
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
    if (dtype_ == DType::boolean) return integer != 0;
    return is_floating(dtype_) ? double_value(value) : Json(integer);
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
