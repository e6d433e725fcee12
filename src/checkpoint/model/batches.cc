#include "checkpoint/model/batches.hpp"

#include <algorithm>
#include <vector>

namespace tsr {

namespace {

// The boxes of at most `most` elements, each contiguous in `box`, that are its content in order.
void cut(const Box& box, int dim, int64_t most, const std::function<void(const Box&)>& visit) {
    const int64_t all = box.numel();
    if (all == 0) return;
    if (all <= most || dim == box.sizes.ndim()) return visit(box);
    const int64_t row = all / box.sizes[dim];
    const int64_t rows = std::max<int64_t>(most / row, 1);
    for (int64_t begin = 0; begin < box.sizes[dim]; begin += rows) {
        Box part = box;
        part.offsets[dim] += begin;
        part.sizes[dim] = std::min(rows, box.sizes[dim] - begin);
        cut(part, dim + 1, most, visit);
    }
}

}  // namespace

void for_each_batch(std::span<const TypedBox> boxes, int64_t batch_bytes,
                    const std::function<void(std::span<const BatchPart> parts, int64_t bytes)>& visit) {
    std::vector<BatchPart> parts;
    int64_t bytes = 0;
    const auto flush = [&] {
        if (!parts.empty()) visit(parts, bytes);
        parts.clear();
        bytes = 0;
    };
    for (size_t index = 0; index < boxes.size(); ++index) {
        const auto item = static_cast<int64_t>(size_of(boxes[index].dtype));
        int64_t first = 0;
        cut(boxes[index].box, 0, std::max<int64_t>(batch_bytes / item, 1), [&](const Box& box) {
            const int64_t size = box.numel() * item;
            if (bytes + size > batch_bytes) flush();
            parts.push_back({index, box, first, bytes});
            bytes += size;
            first += box.numel();
        });
    }
    flush();
}

int64_t largest_batch(std::span<const TypedBox> boxes, int64_t batch_bytes) {
    int64_t sum = 0;
    for (const TypedBox& box : boxes) {
        sum += box.size_bytes();
        if (sum >= batch_bytes) return std::max<int64_t>(batch_bytes, 8);
    }
    return sum;
}

}  // namespace tsr
