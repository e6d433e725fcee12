#include "comm/shm/buffers.hpp"

#include <algorithm>

namespace tsr::shm {

void BufferTable::add(const Region& region) {
    const std::lock_guard lock(mutex_);
    regions_.push_back(region);
    count_.store(regions_.size(), std::memory_order_relaxed);
}

void BufferTable::remove(uint64_t id) {
    const std::lock_guard lock(mutex_);
    std::erase_if(regions_, [id](const Region& region) { return region.id == id; });
    count_.store(regions_.size(), std::memory_order_relaxed);
}

Location BufferTable::locate(const std::byte* data, size_t size) const {
    if (size == 0 || count_.load(std::memory_order_relaxed) == 0) return {};
    const std::lock_guard lock(mutex_);
    for (const Region& region : regions_) {
        const std::byte* begin = region.of_rank(region.rank);
        if (data >= begin && data + size <= begin + region.stride) {
            return {region.id, static_cast<uint64_t>(data - begin)};
        }
    }
    return {};
}

Region BufferTable::find(uint64_t id) const {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(regions_.begin(), regions_.end(), [id](const Region& r) { return r.id == id; });
    return found == regions_.end() ? Region{} : *found;
}

}  // namespace tsr::shm
