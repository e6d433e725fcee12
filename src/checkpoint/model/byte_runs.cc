#include "checkpoint/model/byte_runs.hpp"

#include <algorithm>
#include <cstring>

namespace tsr {

ByteRuns::ByteRuns(std::span<const Piece> pieces, CopyStreams* copies) {
    for (const Piece& piece : pieces) {
        const bool on_device = piece.device.type != DeviceType::cpu && piece.size_bytes() > 0;
        add(piece.data, piece.size_bytes(), on_device ? copies->of(piece.device) : nullptr);
    }
}

ByteRuns::ByteRuns(std::span<const Part> parts) {
    for (const Part& part : parts) add(part.bytes.data(), static_cast<int64_t>(part.bytes.size()), part.on);
}

void ByteRuns::add(const std::byte* data, int64_t size, CopyStream* on) {
    if (size == 0) return;
    if (data_.empty() || data_.back() + (size_ - begins_.back()) != data || on != device_of(data_.size() - 1)) {
        begins_.push_back(size_);
        data_.push_back(data);
        if (on != nullptr || !on_.empty()) {
            on_.resize(data_.size(), nullptr);
            on_.back() = on;
        }
    }
    size_ += size;
}

const std::byte* ByteRuns::contiguous(int64_t begin, int64_t end) const {
    const size_t run = run_of(begin);
    if (device_of(run) != nullptr) return nullptr;
    return end <= run_end(run) ? data_[run] + (begin - begins_[run]) : nullptr;
}

void ByteRuns::copy(int64_t begin, int64_t end, std::byte* to) const {
    std::vector<CopyStream*> used;
    for_each_run(begin, end, [&](const Part& run) {
        if (run.on == nullptr) {
            std::memcpy(to, run.bytes.data(), run.bytes.size());
        } else {
            run.on->copy(to, run.bytes.data(), run.bytes.size());
            if (std::find(used.begin(), used.end(), run.on) == used.end()) used.push_back(run.on);
        }
        to += run.bytes.size();
    });
    for (CopyStream* one : used) one->wait();
}

std::shared_ptr<std::byte> ByteRuns::buffer() const {
    const auto device = std::find_if(on_.begin(), on_.end(), [](const CopyStream* on) { return on != nullptr; });
    return device == on_.end() ? ChunkSource::buffer() : (*device)->slice();
}

void ByteRuns::for_each_run(int64_t begin, int64_t end, const std::function<void(const Part&)>& visit) const {
    for (size_t run = run_of(begin); begin < end; ++run) {
        const int64_t stop = std::min(end, run_end(run));
        visit({{data_[run] + (begin - begins_[run]), static_cast<size_t>(stop - begin)}, device_of(run)});
        begin = stop;
    }
}

size_t ByteRuns::run_of(int64_t offset) const {
    return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin()) - 1;
}

}  // namespace tsr
