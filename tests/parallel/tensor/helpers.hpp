// What the tests of tensor parallelism share: a mesh of one dimension, random numbers, and whole tensors and their parts.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/splitmix64.hpp"
#include "comm/mesh.hpp"
#include "optim/optimizer.hpp"
#include "ranks.hpp"
#include "tensor/layout.hpp"
#include "tensor/tensor.hpp"

namespace tsr::testing {

inline DeviceMesh mesh_of(Communicator& comm) { return {comm, MeshShape({"tp"}, {comm.world_size()})}; }

inline std::vector<double> random_numbers(uint64_t seed, size_t count) {
    SplitMix64 random(seed);
    std::vector<double> numbers(count);
    for (double& number : numbers) number = static_cast<double>(random.next() >> 11) / 9007199254740992.0 - 0.5;
    return numbers;
}

template <class T>
constexpr DType dtype_of = sizeof(T) == sizeof(float) ? DType::f32 : DType::f64;

template <class T>
Tensor tensor_of_shape(std::vector<T>& values, const Dims& shape) {
    values.resize(static_cast<size_t>(shape.product()));
    return {reinterpret_cast<std::byte*>(values.data()), shape, dtype_of<T>, {}};
}

// Rank `rank`'s part of `whole` along `dim`, element by element.
template <class T>
std::vector<T> part_of(const std::vector<T>& whole, const Dims& shape, int dim, int ranks, int rank) {
    const Range range = chunk(shape[dim], ranks, rank);
    int64_t inner = 1;
    for (int d = dim + 1; d < shape.ndim(); ++d) inner *= shape[d];
    std::vector<T> part;
    for (size_t i = 0; i < whole.size(); ++i) {
        const int64_t at = static_cast<int64_t>(i) / inner % shape[dim];
        if (at >= range.begin && at < range.end) part.push_back(whole[i]);
    }
    return part;
}

inline Dims part_shape(Dims shape, int dim, int ranks, int rank) {
    const Range range = chunk(shape[dim], ranks, rank);
    shape[dim] = range.end - range.begin;
    return shape;
}

// What this rank holds of a whole parameter.
template <class T>
std::vector<T> held_part(const std::vector<T>& whole, const Held& held) {
    const Dims& shape = held.layout.shape();
    std::vector<T> part;
    for (const Box& box : held.layout.boxes_of(held.rank)) {
        for (int64_t i = 0; i < box.numel(); ++i) {
            int64_t rest = i;
            int64_t at = 0;
            int64_t stride = 1;
            for (int d = shape.ndim() - 1; d >= 0; --d) {
                at += (box.offsets[d] + rest % box.sizes[d]) * stride;
                rest /= box.sizes[d];
                stride *= shape[d];
            }
            part.push_back(whole[static_cast<size_t>(at)]);
        }
    }
    return part;
}

// out[i, j] = sum over k of a[i, k] b[j, k], plus what is there.
void multiply_transposed(const auto& a, const auto& b, auto&& out, size_t rows, size_t columns, size_t inner) {
    for (size_t i = 0; i < rows; ++i) {
        for (size_t j = 0; j < columns; ++j) {
            std::remove_cvref_t<decltype(out[0])> sum = 0;
            for (size_t k = 0; k < inner; ++k) sum += a[i * inner + k] * b[j * inner + k];
            out[i * columns + j] += sum;
        }
    }
}

// out[i, j] = sum over k of a[i, k] b[k, j], plus what is there.
void multiply(const auto& a, const auto& b, auto&& out, size_t rows, size_t columns, size_t inner) {
    for (size_t i = 0; i < rows; ++i) {
        for (size_t k = 0; k < inner; ++k) {
            for (size_t j = 0; j < columns; ++j) out[i * columns + j] += a[i * inner + k] * b[k * columns + j];
        }
    }
}

// out[i, j] = sum over k of a[k, i] b[k, j], plus what is there.
void multiply_first_transposed(const auto& a, const auto& b, auto&& out, size_t rows, size_t columns, size_t inner) {
    for (size_t k = 0; k < inner; ++k) {
        for (size_t i = 0; i < rows; ++i) {
            for (size_t j = 0; j < columns; ++j) out[i * columns + j] += a[k * rows + i] * b[k * columns + j];
        }
    }
}

}  // namespace tsr::testing
