// Test values: what rank r puts at element i, what a reduction of them must give, and access to an element of any dtype
// as a double. All values are exact in every dtype, so that references need no tolerance.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "comm/request.hpp"
#include "tensor/tensor.hpp"

namespace tsr::testing {

// 1 or 2, so that the product of 8 of them and the sum of 8 of them fit an int8 and are exact in bf16.
inline double input_value(int rank, int64_t i) { return (i + rank) % 5 == 0 && rank < 6 ? 2 : 1; }

inline double expected_value(int world_size, int64_t i, DType dtype, ReduceOp op) {
    double result = input_value(0, i);
    for (int rank = 1; rank < world_size; ++rank) {
        const double value = input_value(rank, i);
        switch (op) {
            case ReduceOp::sum:
            case ReduceOp::avg: result += value; break;
            case ReduceOp::min: result = std::min(result, value); break;
            case ReduceOp::max: result = std::max(result, value); break;
            case ReduceOp::prod: result *= value; break;
            case ReduceOp::none: throw std::logic_error("no operation");
        }
    }
    if (op != ReduceOp::avg) return result;
    result /= world_size;
    if (!is_floating(dtype)) return std::trunc(result);
    if (dtype == DType::f64) return result;
    const auto rounded = static_cast<float>(result);
    if (dtype == DType::f32) return rounded;
    // Round to the mantissa of the small type: 11 significant bits for f16, 8 for bf16; values are near 1.
    int exponent = 0;
    const double mantissa = std::frexp(static_cast<double>(rounded), &exponent);
    const double scale = dtype == DType::f16 ? 2048 : 256;
    return std::ldexp(std::nearbyint(mantissa * scale) / scale, exponent);
}

// Plain conversions of normal numbers and zero, apart from those of the library.
inline double half_to_double(uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    const int mantissa = bits & 1023;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

inline uint16_t double_to_half(double value) {
    if (value == 0) return 0;
    int exponent = 0;
    const double mantissa = std::frexp(std::fabs(value), &exponent);  // [0.5, 1)
    const auto bits = static_cast<int>(std::nearbyint(mantissa * 2048)) - 1024;
    return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (((exponent + 14) << 10) + bits));
}

template <class T>
T load(const Tensor& tensor, int64_t i) {
    T value;
    std::memcpy(&value, tensor.data + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    return value;
}

template <class T>
void save(const Tensor& tensor, int64_t i, T value) {
    std::memcpy(tensor.data + static_cast<size_t>(i) * sizeof(T), &value, sizeof(T));
}

inline double get(const Tensor& tensor, int64_t i) {
    switch (tensor.dtype) {
        case DType::f16: return half_to_double(load<uint16_t>(tensor, i));
        case DType::bf16: return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(tensor, i)) << 16);
        case DType::f32: return load<float>(tensor, i);
        case DType::f64: return load<double>(tensor, i);
        case DType::i8: return load<int8_t>(tensor, i);
        case DType::u8: return load<uint8_t>(tensor, i);
        case DType::i32: return load<int32_t>(tensor, i);
        case DType::i64: return static_cast<double>(load<int64_t>(tensor, i));
        default: throw std::logic_error("not a dtype of these tests");
    }
}

inline void put(const Tensor& tensor, int64_t i, double value) {
    switch (tensor.dtype) {
        case DType::f16: return save(tensor, i, double_to_half(value));
        case DType::bf16:
            return save(tensor, i, static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16));
        case DType::f32: return save(tensor, i, static_cast<float>(value));
        case DType::f64: return save(tensor, i, value);
        case DType::i8: return save(tensor, i, static_cast<int8_t>(value));
        case DType::u8: return save(tensor, i, static_cast<uint8_t>(value));
        case DType::i32: return save(tensor, i, static_cast<int32_t>(value));
        case DType::i64: return save(tensor, i, static_cast<int64_t>(value));
        default: throw std::logic_error("not a dtype of these tests");
    }
}

}  // namespace tsr::testing
