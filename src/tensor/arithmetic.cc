#include "tensor/arithmetic.hpp"

#include <algorithm>
#include <array>
#include <span>

#include "tensor/convert.hpp"

namespace tsr {

namespace {

constexpr int64_t block = 1024;
using Block = std::array<float, block>;

std::byte* bytes_of(Block& floats) { return reinterpret_cast<std::byte*>(floats.data()); }

template <class T>
void divide_each(std::span<T> values, T divisor) {
    for (T& value : values) value /= divisor;
}

template <class T>
void add_each(std::span<T> sums, std::span<T> more) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
}

// Calls step(offset in bytes, elements) for one block after the other.
template <class Step>
void for_blocks(const Tensor& tensor, Step&& step) {
    for (int64_t done = 0; done < tensor.numel(); done += block) {
        step(static_cast<size_t>(done) * size_of(tensor.dtype), std::min(block, tensor.numel() - done));
    }
}

}  // namespace

void divide(const Tensor& tensor, double divisor) {
    if (tensor.dtype == DType::f32) return divide_each(tensor.as<float>(), static_cast<float>(divisor));
    if (tensor.dtype == DType::f64) return divide_each(tensor.as<double>(), divisor);
    Block wide;
    for_blocks(tensor, [&](size_t at, int64_t n) {
        convert(tensor.data + at, tensor.dtype, bytes_of(wide), DType::f32, n);
        divide_each(std::span(wide).first(static_cast<size_t>(n)), static_cast<float>(divisor));
        convert(bytes_of(wide), DType::f32, tensor.data + at, tensor.dtype, n);
    });
}

void add(const Tensor& sum, const Tensor& more) {
    if (sum.dtype == DType::f32) return add_each(sum.as<float>(), more.as<float>());
    if (sum.dtype == DType::f64) return add_each(sum.as<double>(), more.as<double>());
    Block a;
    Block b;
    for_blocks(sum, [&](size_t at, int64_t n) {
        convert(sum.data + at, sum.dtype, bytes_of(a), DType::f32, n);
        convert(more.data + at, more.dtype, bytes_of(b), DType::f32, n);
        add_each(std::span(a).first(static_cast<size_t>(n)), std::span(b).first(static_cast<size_t>(n)));
        convert(bytes_of(a), DType::f32, sum.data + at, sum.dtype, n);
    });
}

}  // namespace tsr
