// Test values: what rank r puts at element i, what a reduction of them must give, and how they get into a tensor of any
// dtype and are compared with it. All values are exact in every dtype, so that references need no tolerance. They repeat
// every few elements, so that long tensors are written and compared a block at a time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "comm/request.hpp"
#include "tensor/tensor.hpp"

namespace tsr::testing {

inline constexpr int64_t period = 5;  // after so many elements they are the same again

// 1 or 2, so that the product of 8 of them and the sum of 8 of them fit an int8 and are exact in bf16.
inline double input_value(int rank, int64_t i) { return (i + rank) % period == 0 && rank < 6 ? 2 : 1; }

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
void save(const Tensor& tensor, int64_t i, T value) {
    std::memcpy(tensor.data + static_cast<size_t>(i) * sizeof(T), &value, sizeof(T));
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

// Elements of a dtype, `value(i)` at i, of which the first `period` say what the others are. A sanitizer looks at each
// byte of the tensor, but once for a block.
class Repeated {
   public:
    template <class Value>
    Repeated(DType dtype, const Value& value) : size_(size_of(dtype)) {
        const Tensor first{block_.data(), Dims{period}, dtype, {}};
        for (int64_t i = 0; i < period; ++i) put(first, i, value(i));
        for (size_t have = period * size_; have < count * size_; have *= 2) {
            std::memcpy(block_.data() + have, block_.data(), have);
        }
    }
    void write(std::byte* to, int64_t elements) const {
        for_blocks(elements, [&](size_t at, size_t bytes) {
            std::memcpy(to + at, block_.data(), bytes);
            return true;
        });
    }
    // The first that is another; -1 if there is none.
    [[nodiscard]] int64_t first_other(const std::byte* from, int64_t elements) const {
        int64_t other = -1;
        for_blocks(elements, [&](size_t at, size_t bytes) {
            if (std::memcmp(from + at, block_.data(), bytes) == 0) return true;
            size_t i = 0;
            while (std::memcmp(from + at + i, block_.data() + i, size_) == 0) i += size_;
            other = static_cast<int64_t>((at + i) / size_);
            return false;
        });
        return other;
    }

   private:
    static constexpr size_t count = size_t{period} << 7;

    template <class Visit>
    void for_blocks(int64_t elements, const Visit& visit) const {
        const size_t end = static_cast<size_t>(elements) * size_;
        for (size_t at = 0; at < end; at += count * size_) {
            if (!visit(at, std::min(count * size_, end - at))) return;
        }
    }

    size_t size_;
    std::array<std::byte, count * sizeof(double)> block_{};
};

// Element i becomes `value(i)`.
template <class Value>
void put_all(const Tensor& tensor, const Value& value) {
    Repeated(tensor.dtype, value).write(tensor.data, tensor.numel());
}

// The first element that is not what `value` says; -1 if there is none. Values repeat within `piece` elements, not from
// one piece to the next.
template <class Value>
int64_t first_other(const Tensor& tensor, const Value& value, int64_t piece = INT64_MAX) {
    for (int64_t first = 0; first < tensor.numel(); first += std::min(piece, tensor.numel() - first)) {
        const Repeated expected(tensor.dtype, [&](int64_t i) { return value(first + i); });
        const std::byte* from = tensor.data + static_cast<size_t>(first) * size_of(tensor.dtype);
        const int64_t other = expected.first_other(from, std::min(piece, tensor.numel() - first));
        if (other >= 0) return first + other;
    }
    return -1;
}

}  // namespace tsr::testing
