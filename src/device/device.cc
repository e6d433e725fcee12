#include "device/device.hpp"

#include <fmt/core.h>

#include "base/error.hpp"

namespace tsr {

std::shared_ptr<void> DeviceApi::allocate_pages(size_t /*size*/) {
    throw Error(Code::unsupported, fmt::format("{} has no ranges of addresses", name()));
}

std::unique_ptr<DeviceRange> DeviceApi::reserve(size_t /*size*/) {
    throw Error(Code::unsupported, fmt::format("{} has no ranges of addresses", name()));
}

DeviceApi& device_api(Device device) {
    switch (device.type) {
        case DeviceType::cpu: return cpu_device();
        case DeviceType::cuda: return cuda_device(device.index);
    }
    throw Error(Code::invalid_argument,
                fmt::format("device type {} is unknown; the CPU is {}, CUDA {}", static_cast<int>(device.type),
                            static_cast<int>(DeviceType::cpu), static_cast<int>(DeviceType::cuda)));
}

}  // namespace tsr
