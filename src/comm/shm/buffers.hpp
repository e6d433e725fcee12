// The buffers that a communicator has allocated and this rank still holds, to look up a tensor by its address. The
// table outlives the transport if a buffer does. Thread-safe.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/shm/layout.hpp"
#include "comm/shm/segment.hpp"

namespace tsr::shm {

// One rank's region of a segment that has a region for each rank: region r begins at r * stride.
struct Region {
    uint64_t id = 0;
    std::shared_ptr<Segment> segment;
    size_t stride = 0;
    size_t rank = 0;

    [[nodiscard]] std::byte* of_rank(size_t r) const { return segment->data() + r * stride; }
};

class BufferTable {
   public:
    void add(const Region& region);
    void remove(uint64_t id);
    // The location of [data, data + size) in one of this rank's regions; buffer 0 if it is in none.
    [[nodiscard]] Location locate(const std::byte* data, size_t size) const;
    [[nodiscard]] Region find(uint64_t id) const;  // returns id 0 if no longer held

   private:
    std::atomic<size_t> count_{0};  // lets a rank without buffers skip the lock
    mutable std::mutex mutex_;      // guards regions_
    std::vector<Region> regions_;
};

class SharedBuffer final : public Buffer {
   public:
    SharedBuffer(std::shared_ptr<BufferTable> table, Region region, size_t size)
        : table_(std::move(table)), region_(std::move(region)), size_(size) {}
    ~SharedBuffer() override { table_->remove(region_.id); }
    [[nodiscard]] std::byte* data() const override { return region_.of_rank(region_.rank); }
    [[nodiscard]] size_t size() const override { return size_; }
    [[nodiscard]] std::byte* of_rank(int rank) const override { return region_.of_rank(static_cast<size_t>(rank)); }

   private:
    std::shared_ptr<BufferTable> table_;
    Region region_;
    size_t size_;
};

}  // namespace tsr::shm
