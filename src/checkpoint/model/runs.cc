#include "checkpoint/model/runs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.hpp"
#include "tensor/convert.hpp"

namespace tsr {

Runs::Runs(const Box& part, const FilePlace& file, const MemoryPlace& memory)
    : file_item_(static_cast<int64_t>(size_of(file.dtype))),
      memory_item_(static_cast<int64_t>(size_of(memory.dtype))),
      file_dtype_(file.dtype),
      memory_dtype_(memory.dtype) {
    struct Dim {
        int64_t size;
        int64_t file_stride;
        int64_t memory_stride;
    };
    std::array<Dim, max_ndim> dims{};
    size_t count = 0;
    int64_t file_stride = 1;
    int64_t memory_stride = 1;
    int64_t file_first = 0;
    int64_t memory_first = 0;
    for (int d = part.sizes.ndim() - 1; d >= 0; --d) {
        const int64_t stride = file.strides != nullptr ? (*file.strides)[d] : file_stride;
        file_first += (part.offsets[d] - file.box->offsets[d]) * stride;
        memory_first += (part.offsets[d] - memory.box->offsets[d]) * memory_stride;
        if (part.sizes[d] != 1) dims[count++] = {part.sizes[d], stride, memory_stride};
        file_stride *= file.box->sizes[d];
        memory_stride *= memory.box->sizes[d];
    }
    std::stable_sort(dims.begin(), dims.begin() + count,
                     [](const Dim& a, const Dim& b) { return a.file_stride < b.file_stride; });
    int64_t extent = 1;  // elements from the first to the last of the dimensions so far
    int64_t run = 1;
    for (size_t i = 0; i < count; ++i) {
        const Dim& dim = dims[i];
        if (dim.file_stride < extent && dim.file_stride != 0) {
            throw Error(Code::unsupported, "its elements overlap in their storage; save a contiguous copy of it");
        }
        extent += (dim.size - 1) * dim.file_stride;
        if (outer_.empty() && dim.file_stride == run && dim.memory_stride == run) {
            run *= dim.size;
            continue;
        }
        outer_.push_back({dim.size, dim.file_stride * file_item_, dim.memory_stride * memory_item_});
        count_ *= dim.size;
    }
    run_bytes_ = run * file_item_;
    file_begin_ = file.begin + file_first * file_item_;
    file_end_ = file_begin_ + extent * file_item_;
    memory_begin_ = memory.data + memory_first * memory_item_;
}

int64_t Runs::file_offset(int64_t run) const {
    int64_t offset = file_begin_;
    for (const Outer& outer : outer_) {
        offset += run % outer.size * outer.file_stride;
        run /= outer.size;
    }
    return offset;
}

void Runs::scatter(int64_t begin, int64_t end, const std::byte* data) const {
    // The first run that ends after `begin`.
    int64_t low = 0;
    int64_t high = count_;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (file_offset(middle) + run_bytes_ > begin) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    std::array<int64_t, max_ndim> index{};
    int64_t offset = file_begin_;
    std::byte* memory = memory_begin_;
    int64_t rest = low;
    for (size_t d = 0; d < outer_.size(); ++d) {
        const Outer& outer = outer_[d];
        index[d] = rest % outer.size;
        offset += index[d] * outer.file_stride;
        memory += index[d] * outer.memory_stride;
        rest /= outer.size;
    }
    for (int64_t run = low; run < count_ && offset < end; ++run) {
        const int64_t from = std::max(offset, begin);
        const int64_t bytes = std::min(offset + run_bytes_, end) - from;
        std::byte* to = memory + (from - offset) / file_item_ * memory_item_;
        if (converts()) {
            convert(data + (from - begin), file_dtype_, to, memory_dtype_, bytes / file_item_);
        } else {
            std::memcpy(to, data + (from - begin), static_cast<size_t>(bytes));
        }
        for (size_t d = 0; d < outer_.size(); ++d) {
            const Outer& outer = outer_[d];
            offset += outer.file_stride;
            memory += outer.memory_stride;
            if (++index[d] < outer.size) break;
            index[d] = 0;
            offset -= outer.size * outer.file_stride;
            memory -= outer.size * outer.memory_stride;
        }
    }
}

}  // namespace tsr
