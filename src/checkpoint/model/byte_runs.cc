#include "checkpoint/model/byte_runs.hpp"

#include <algorithm>
#include <cstring>

namespace tsr {

ByteRuns::ByteRuns(std::span<const Piece> pieces) {
    for (const Piece& piece : pieces) add(piece.data, piece.size_bytes());
}

ByteRuns::ByteRuns(std::span<const std::span<const std::byte>> parts) {
    for (const auto part : parts) add(part.data(), static_cast<int64_t>(part.size()));
}

void ByteRuns::add(const std::byte* data, int64_t size) {
    if (size == 0) return;
    if (data_.empty() || data_.back() + (size_ - begins_.back()) != data) {
        begins_.push_back(size_);
        data_.push_back(data);
    }
    size_ += size;
}

const std::byte* ByteRuns::contiguous(int64_t begin, int64_t end) const {
    const size_t run = run_of(begin);
    return end <= run_end(run) ? data_[run] + (begin - begins_[run]) : nullptr;
}

void ByteRuns::copy(int64_t begin, int64_t end, std::byte* to) const {
    for_each_run(begin, end, [&](std::span<const std::byte> run) {
        std::memcpy(to, run.data(), run.size());
        to += run.size();
    });
}

void ByteRuns::for_each_run(int64_t begin, int64_t end,
                            const std::function<void(std::span<const std::byte>)>& visit) const {
    for (size_t run = run_of(begin); begin < end; ++run) {
        const int64_t stop = std::min(end, run_end(run));
        visit({data_[run] + (begin - begins_[run]), static_cast<size_t>(stop - begin)});
        begin = stop;
    }
}

size_t ByteRuns::run_of(int64_t offset) const {
    return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin()) - 1;
}

}  // namespace tsr
