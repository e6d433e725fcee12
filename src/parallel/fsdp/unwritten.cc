#include "parallel/fsdp/unwritten.hpp"

#include <bit>
#include <cstring>
#include <utility>

namespace tsr {

namespace {

// For a floating-point dtype: all exponent bits set, the quiet bit clear, and a payload of our own.
uint64_t mark_of(DType dtype) {
    switch (dtype) {
        case DType::f16: return 0x7d5b;
        case DType::bf16: return 0x7fab;
        case DType::f32: return 0x7fa5d3c7;
        default: return 0x7ff4d3c75a96a5b7;
    }
}

static_assert(std::endian::native == std::endian::little);

std::pair<std::byte*, std::byte*> ends(const Tensor& grad) {
    return {grad.data, grad.data + grad.size_bytes() - size_of(grad.dtype)};
}

}  // namespace

void mark_unwritten(const Tensor& grad) {
    if (grad.size_bytes() == 0) return;
    const uint64_t mark = mark_of(grad.dtype);
    const auto [first, last] = ends(grad);
    std::memcpy(first, &mark, size_of(grad.dtype));
    std::memcpy(last, &mark, size_of(grad.dtype));
}

bool is_unwritten(const Tensor& grad) {
    if (grad.size_bytes() == 0) return false;
    const uint64_t mark = mark_of(grad.dtype);
    const auto [first, last] = ends(grad);
    return std::memcmp(first, &mark, size_of(grad.dtype)) == 0 || std::memcmp(last, &mark, size_of(grad.dtype)) == 0;
}

}  // namespace tsr
