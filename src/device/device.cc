#include "device/device.hpp"

#include <fmt/core.h>

#include "base/error.hpp"

namespace tsr {

void DeviceApi::refuse_stream(StreamHandle stream, std::string_view device) {
    if (stream == nullptr) return;
    throw Error(Code::invalid_argument,
                fmt::format("a stream was passed for a tensor on the {0}; the {0} has no streams: pass NULL", device));
}

DeviceApi& device_api(Device device) {
    if (device.type == DeviceType::cpu) return cpu_device();
    throw Error(Code::unsupported, fmt::format("device type {} is not supported; use the CPU ({})",
                                               static_cast<int>(device.type), static_cast<int>(DeviceType::cpu)));
}

}  // namespace tsr
