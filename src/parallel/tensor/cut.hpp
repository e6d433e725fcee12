// How an activation is cut along a dimension over the ranks of a group: pure arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.hpp"
#include "tensor/layout.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// A tensor as rows that are cut: `outer` rows of `length` items of `item` bytes, of which rank r has those of
// chunk(length, ranks, r).
struct Cut {
    size_t outer = 1;
    size_t length = 0;
    size_t item = 0;
    size_t ranks = 1;

    Cut(const Tensor& whole, int dim, int world_size)
        : length(static_cast<size_t>(whole.shape[dim])),
          item(size_of(whole.dtype)),
          ranks(static_cast<size_t>(world_size)) {
        for (int d = 0; d < dim; ++d) outer *= static_cast<size_t>(whole.shape[d]);
        for (int d = dim + 1; d < whole.shape.ndim(); ++d) item *= static_cast<size_t>(whole.shape[d]);
    }

    // Items of the largest part, to which all are padded in the scratch memory.
    [[nodiscard]] size_t padded() const { return (length + ranks - 1) / ranks; }
    [[nodiscard]] size_t part_size() const { return outer * padded() * item; }
    [[nodiscard]] bool is_even() const { return length % ranks == 0; }
    [[nodiscard]] bool is_outermost() const { return outer == 1; }
    [[nodiscard]] Range range(size_t rank) const {
        return chunk(static_cast<int64_t>(length), static_cast<int64_t>(ranks), static_cast<int64_t>(rank));
    }
    [[nodiscard]] size_t row(size_t rank) const {
        return static_cast<size_t>(range(rank).end - range(rank).begin) * item;
    }
    // Where the part of `rank` lies in the whole tensor.
    [[nodiscard]] ByteRows in(std::byte* whole, size_t rank) const {
        return {whole + static_cast<size_t>(range(rank).begin) * item, length * item};
    }
};

}  // namespace tsr
