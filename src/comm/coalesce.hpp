// Lists of tensors on transports that move one range of memory at a time: small tensors are packed into one range.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "tensor/tensor.hpp"

namespace tsr {

// Lists up to this size are moved as one.
inline constexpr size_t packed_size = size_t{4} << 20;

inline size_t size_of_list(std::span<const Tensor> list) {
    size_t size = 0;
    for (const Tensor& tensor : list) size += tensor.size_bytes();
    return size;
}

inline void copy_bytes(std::byte* to, const std::byte* from, size_t size) {
    if (size > 0 && to != from) std::memcpy(to, from, size);
}

inline void pack(std::span<const Tensor> list, std::byte* to) {
    for (const Tensor& tensor : list) {
        copy_bytes(to, tensor.data, tensor.size_bytes());
        to += tensor.size_bytes();
    }
}

inline void unpack(const std::byte* from, std::span<const Tensor> list) {
    for (const Tensor& tensor : list) {
        copy_bytes(tensor.data, from, tensor.size_bytes());
        from += tensor.size_bytes();
    }
}

// The r-th of `parts` equal parts of each tensor.
inline std::vector<Tensor> parts_of(std::span<const Tensor> list, size_t r, size_t parts) {
    std::vector<Tensor> result;
    for (const Tensor& whole : list) {
        const size_t size = whole.size_bytes() / parts;
        result.push_back({whole.data + r * size, Dims{static_cast<int64_t>(size / size_of(whole.dtype))}, whole.dtype,
                          whole.device});
    }
    return result;
}

// For all_gather and reduce_scatter, whose lists pair each tensor with a rank's part of it. Calls step(wholes, parts)
// for consecutive batches: one pair, or several whose wholes total at most packed_size.
template <class Step>
void for_batches(std::span<const Tensor> wholes, std::span<const Tensor> parts, Step&& step) {
    for (size_t first = 0; first < wholes.size();) {
        size_t size = wholes[first].size_bytes();
        size_t end = first + 1;
        while (end < wholes.size() && size + wholes[end].size_bytes() <= packed_size)
            size += wholes[end++].size_bytes();
        step(wholes.subspan(first, end - first), parts.subspan(first, end - first));
        first = end;
    }
}

// One batch of an all_gather: `step(part, all)` gathers one tensor; several tensors are packed into one for it.
template <class Step>
void gather_batch(std::span<const Tensor> wholes, std::span<const Tensor> parts, size_t ranks, Step&& step) {
    if (parts.size() == 1) return step(parts[0], wholes[0]);
    const size_t size = size_of_list(parts);
    std::vector<std::byte> packed((ranks + 1) * size);
    std::byte* own = packed.data() + ranks * size;
    pack(parts, own);
    const DType dtype = parts[0].dtype;
    const auto count = static_cast<int64_t>(size / size_of(dtype));
    step(Tensor{own, Dims{count}, dtype, {}},
         Tensor{packed.data(), Dims{count * static_cast<int64_t>(ranks)}, dtype, {}});
    for (size_t r = 0; r < ranks; ++r) unpack(packed.data() + r * size, parts_of(wholes, r, ranks));
}

// One batch of a reduce_scatter, likewise: `step(all, part)`.
template <class Step>
void scatter_batch(std::span<const Tensor> wholes, std::span<const Tensor> parts, size_t ranks, Step&& step) {
    if (parts.size() == 1) return step(wholes[0], parts[0]);
    const size_t size = size_of_list(parts);
    std::vector<std::byte> packed((ranks + 1) * size);
    std::byte* own = packed.data() + ranks * size;
    for (size_t r = 0; r < ranks; ++r) pack(parts_of(wholes, r, ranks), packed.data() + r * size);
    const DType dtype = parts[0].dtype;
    const auto count = static_cast<int64_t>(size / size_of(dtype));
    step(Tensor{packed.data(), Dims{count * static_cast<int64_t>(ranks)}, dtype, {}},
         Tensor{own, Dims{count}, dtype, {}});
    unpack(own, parts);
}

}  // namespace tsr
