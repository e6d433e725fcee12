// Memory of a device that grows. Former pieces stay: the device may still use them, and to free one would make the host wait.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device/device.hpp"

namespace tsr {

class GrowingMemory {
   public:
    // At least `size` bytes, whose former content stays behind. Throws NO_MEMORY.
    void reserve(size_t size, DeviceApi& device) {
        if (size <= size_) return;
        pieces_.push_back(device.allocate(size));
        size_ = size;
    }
    [[nodiscard]] std::byte* data() const { return pieces_.empty() ? nullptr : pieces_.back().get(); }

   private:
    std::vector<std::shared_ptr<std::byte>> pieces_;  // the last is in use
    size_t size_ = 0;
};

}  // namespace tsr
