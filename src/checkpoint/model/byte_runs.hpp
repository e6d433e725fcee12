// The data of a file, as it lies in the memory of the tensors, on the host and on devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "checkpoint/io/stream.hpp"
#include "checkpoint/model/piece.hpp"
#include "device/copy_streams.hpp"

namespace tsr {

// One byte range over the pieces' memories.
class ByteRuns final : public ChunkSource {
   public:
    struct Part {
        std::span<const std::byte> bytes;
        CopyStream* on = nullptr;  // the device that has them; nullptr: the host
    };

    // In file order; neighbours in memory become one run. `copies`: needed if a piece is on a device.
    explicit ByteRuns(std::span<const Piece> pieces, CopyStreams* copies = nullptr);
    explicit ByteRuns(std::span<const Part> parts);

    [[nodiscard]] int64_t size() const override { return size_; }
    [[nodiscard]] const std::byte* contiguous(int64_t begin, int64_t end) const override;
    void copy(int64_t begin, int64_t end, std::byte* to) const override;
    [[nodiscard]] std::shared_ptr<std::byte> buffer() const override;
    [[nodiscard]] bool has_devices() const { return !on_.empty(); }
    // The memory of [begin, end), in order.
    void for_each_run(int64_t begin, int64_t end, const std::function<void(const Part&)>& visit) const;

   private:
    void add(const std::byte* data, int64_t size, CopyStream* on);
    [[nodiscard]] CopyStream* device_of(size_t run) const { return on_.empty() ? nullptr : on_[run]; }
    [[nodiscard]] size_t run_of(int64_t offset) const;
    [[nodiscard]] int64_t run_end(size_t run) const { return run + 1 < begins_.size() ? begins_[run + 1] : size_; }

    std::vector<int64_t> begins_;
    std::vector<const std::byte*> data_;
    std::vector<CopyStream*> on_;  // of each run; empty if all are on the host
    int64_t size_ = 0;
};

}  // namespace tsr
