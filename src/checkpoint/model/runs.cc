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
      memory_dtype_(memory.dtype),
      on_(memory.on) {
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

namespace {

// Elements on their way to a device: collected in a slice, then copied, neighbours and rows at once.
class Outgoing {
   public:
    explicit Outgoing(CopyStream& on) : on_(on), slice_(on.slice()) {}

    // Room for up to `size` bytes that belong at `to`; sets `size` to what there is, a multiple of `item`.
    std::byte* room(std::byte* to, size_t& size, size_t item) {
        if (CopyStreams::slice_bytes - used_ < item) send();
        size = std::min(size, (CopyStreams::slice_bytes - used_) / item * item);
        std::byte* const at = slice_.get() + used_;
        if (!parts_.empty() && parts_.back().to + parts_.back().size == to) {
            parts_.back().size += size;
        } else {
            parts_.push_back({to, size});
        }
        used_ += size;
        return at;
    }

    void send() {
        const std::byte* from = slice_.get();
        for (size_t i = 0; i < parts_.size();) {
            const Part& first = parts_[i];
            const size_t rows = count_of_rows(i);
            const size_t stride = rows > 1 ? static_cast<size_t>(parts_[i + 1].to - first.to) : first.size;
            on_.copy_rows({first.to, stride}, {from, first.size}, rows, first.size);
            from += rows * first.size;
            i += rows;
        }
        if (!parts_.empty()) on_.wait();
        parts_.clear();
        used_ = 0;
    }

   private:
    struct Part {
        std::byte* to;
        size_t size;
    };

    // How many parts from `i` on have one size and one distance.
    [[nodiscard]] size_t count_of_rows(size_t i) const {
        size_t end = i + 1;
        while (end < parts_.size() && parts_[end].size == parts_[i].size &&
               parts_[end].to - parts_[end - 1].to == parts_[i + 1].to - parts_[i].to &&
               parts_[end].to >= parts_[end - 1].to + parts_[i].size) {
            ++end;
        }
        return end - i;
    }

    CopyStream& on_;
    const std::shared_ptr<std::byte> slice_;
    size_t used_ = 0;
    std::vector<Part> parts_;
};

}  // namespace

// Calls visit(from, to, bytes in the file) for each part of a run.
template <class Visit>
void Runs::for_each_part(int64_t begin, int64_t end, const std::byte* data, Visit&& visit) const {
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
        visit(data + (from - begin), to, bytes);
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

void Runs::move(const std::byte* from, std::byte* to, int64_t elements) const {
    if (memory_dtype_ != file_dtype_) {
        convert(from, file_dtype_, to, memory_dtype_, elements);
    } else {
        std::memcpy(to, from, static_cast<size_t>(elements * file_item_));
    }
}

void Runs::scatter(int64_t begin, int64_t end, const std::byte* data) const {
    if (on_ != nullptr) [[unlikely]]
        return scatter_to_device(begin, end, data);
    for_each_part(begin, end, data,
                  [&](const std::byte* from, std::byte* to, int64_t bytes) { move(from, to, bytes / file_item_); });
}

void Runs::scatter_to_device(int64_t begin, int64_t end, const std::byte* data) const {
    Outgoing outgoing(*on_);
    for_each_part(begin, end, data, [&](const std::byte* from, std::byte* to, int64_t bytes) {
        auto left = static_cast<size_t>(bytes / file_item_ * memory_item_);
        while (left > 0) {
            size_t size = left;
            std::byte* const at = outgoing.room(to, size, static_cast<size_t>(memory_item_));
            const auto elements = static_cast<int64_t>(size) / memory_item_;
            move(from, at, elements);
            from += elements * file_item_;
            to += size;
            left -= size;
        }
    });
    outgoing.send();
}

}  // namespace tsr
