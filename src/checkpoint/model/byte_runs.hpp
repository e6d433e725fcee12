// The data of a file, as it lies in the memory of the tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "checkpoint/io/stream.hpp"
#include "checkpoint/model/piece.hpp"

namespace tsr {

// One byte range over the pieces' memories.
class ByteRuns final : public ChunkSource {
   public:
    explicit ByteRuns(std::span<const Piece> pieces);  // in file order; neighbours in memory become one run
    explicit ByteRuns(std::span<const std::span<const std::byte>> parts);

    [[nodiscard]] int64_t size() const override { return size_; }
    [[nodiscard]] const std::byte* contiguous(int64_t begin, int64_t end) const override;
    void copy(int64_t begin, int64_t end, std::byte* to) const override;
    // The memory of [begin, end), in order.
    void for_each_run(int64_t begin, int64_t end, const std::function<void(std::span<const std::byte>)>& visit) const;

   private:
    void add(const std::byte* data, int64_t size);
    [[nodiscard]] size_t run_of(int64_t offset) const;
    [[nodiscard]] int64_t run_end(size_t run) const { return run + 1 < begins_.size() ? begins_[run + 1] : size_; }

    std::vector<int64_t> begins_;
    std::vector<const std::byte*> data_;
    int64_t size_ = 0;
};

}  // namespace tsr
