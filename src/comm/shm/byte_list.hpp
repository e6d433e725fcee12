// A list of tensors as one sequence of bytes, as the collectives see it. Reused: it keeps its allocations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "tensor/tensor.hpp"

namespace tsr::shm {

// Tensors that are adjacent in memory are merged into one piece.
class ByteList {
   public:
    void assign(std::span<const Tensor> tensors) {
        clear();
        for (const Tensor& tensor : tensors) add(tensor.data, tensor.size_bytes());
    }
    // The r-th of `parts` equal parts of each tensor.
    void assign_parts(std::span<const Tensor> tensors, size_t r, size_t parts) {
        clear();
        for (const Tensor& tensor : tensors) {
            const size_t size = tensor.size_bytes() / parts;
            add(tensor.data + r * size, size);
        }
    }

    [[nodiscard]] size_t size() const { return total_; }
    [[nodiscard]] bool is_contiguous() const { return more_.empty(); }
    // The memory if the list is one piece, else nullptr.
    [[nodiscard]] std::byte* contiguous() const { return is_contiguous() ? first_.data : nullptr; }
    [[nodiscard]] std::byte* first() const { return first_.data; }
    // Bytes from the first piece's beginning to the last one's end, gaps included; 0 if the pieces do not ascend in
    // memory.
    [[nodiscard]] size_t extent() const {
        if (is_contiguous()) return total_;
        for (size_t i = 1; i < more_.size(); ++i) {
            if (more_[i].data < more_[i - 1].data + more_[i - 1].size) return 0;
        }
        return static_cast<size_t>(last_end_ - first_.data);
    }
    // A hash of the pieces' positions relative to the first; 0 for one piece.
    [[nodiscard]] uint64_t layout() const {
        uint64_t hash = 0;
        for (const Piece& piece : more_) {
            for (const size_t word : {static_cast<size_t>(piece.data - first_.data), piece.size}) {
                hash = (hash ^ word) * 0x9e3779b97f4a7c15;
                hash ^= hash >> 29;
            }
        }
        return hash;
    }
    // Calls visitor(data, size) for each piece of the `n` bytes from `offset` on, in order.
    template <class Visit>
    void visit(size_t offset, size_t n, Visit&& visitor) const {
        if (n == 0) return;
        if (more_.empty()) return visitor(first_.data + offset, n);
        auto piece = std::upper_bound(more_.begin(), more_.end(), offset,
                                      [](size_t at, const Piece& p) { return at < p.begin; });
        for (--piece; n > 0; ++piece) {
            const size_t skip = offset - piece->begin;
            const size_t size = std::min(n, piece->size - skip);
            visitor(piece->data + skip, size);
            offset += size;
            n -= size;
        }
    }

    void read(size_t offset, std::byte* to, size_t n) const {
        visit(offset, n, [&](std::byte* piece, size_t size) {
            std::memcpy(to, piece, size);
            to += size;
        });
    }
    void write(size_t offset, const std::byte* from, size_t n) const {
        visit(offset, n, [&](std::byte* piece, size_t size) {
            std::memcpy(piece, from, size);
            from += size;
        });
    }

   private:
    struct Piece {
        std::byte* data = nullptr;
        size_t size = 0;
        size_t begin = 0;
    };

    void clear() {
        more_.clear();
        first_ = {};
        last_end_ = nullptr;
        total_ = 0;
    }
    void add(std::byte* data, size_t size) {
        if (size == 0) return;
        if (total_ > 0 && last_end_ == data) {
            (more_.empty() ? first_ : more_.back()).size += size;
        } else if (total_ == 0) {
            first_ = {data, size, 0};
        } else {
            if (more_.empty()) more_.push_back(first_);
            more_.push_back({data, size, total_});
        }
        last_end_ = data + size;
        total_ += size;
    }

    Piece first_;
    std::vector<Piece> more_;  // all pieces, if there is more than one
    const std::byte* last_end_ = nullptr;
    size_t total_ = 0;
};

}  // namespace tsr::shm
