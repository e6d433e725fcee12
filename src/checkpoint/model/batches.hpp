// Processes tensors of any size in bounded memory: boxes are cut into consecutive parts in row-major order, and parts
// are collected into batches that are read at once. Large tensors take many batches, small ones share one.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "tensor/dtype.hpp"
#include "tensor/layout.hpp"

namespace tsr {

inline constexpr int64_t default_batch_bytes = int64_t{64} << 20;

struct TypedBox {
    Box box;
    DType dtype = DType::f32;

    [[nodiscard]] int64_t size_bytes() const { return box.numel() * static_cast<int64_t>(size_of(dtype)); }
};

struct BatchPart {
    size_t index = 0;   // of the box in the list that was cut
    Box box;            // a part of that box
    int64_t first = 0;  // number of elements of that box, row-major, before this part
    int64_t begin = 0;  // number of bytes of the batch before this part; parts have no gaps between them
};

// Calls visit(parts, bytes) for each batch. All parts in order are the contents of all boxes in order. No part is
// empty, and no batch has more than `batch_bytes`, unless a single element has.
void for_each_batch(std::span<const TypedBox> boxes, int64_t batch_bytes,
                    const std::function<void(std::span<const BatchPart> parts, int64_t bytes)>& visit);

// An upper bound of the largest batch that for_each_batch() makes of `boxes`: the memory needed.
[[nodiscard]] int64_t largest_batch(std::span<const TypedBox> boxes, int64_t batch_bytes);

}  // namespace tsr
