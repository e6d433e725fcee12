#include "parallel/placement.hpp"

#include <fmt/core.h>

#include "base/error.hpp"
#include "device/device.hpp"

namespace tsr {

Device device_of(std::span<const NamedTensor> params, const std::optional<Device>& own) {
    const NamedTensor& first = params.front();
    for (const NamedTensor& param : params) {
        if (param.tensor.device.type == first.tensor.device.type) continue;
        const bool is_first = first.tensor.device.type == DeviceType::cpu;
        throw Error(
            Code::invalid_argument,
            fmt::format("parameter \"{}\" is on the CPU, but \"{}\" is on a CUDA device; all parameters of a model "
                        "must be in one place",
                        is_first ? first.name : param.name, is_first ? param.name : first.name));
    }
    if (first.tensor.device.type == DeviceType::cpu) return first.tensor.device;
    for (const NamedTensor& param : params) {
        check_on_device(param.tensor, fmt::format("parameter \"{}\"", param.name), own);
    }
    return *own;
}

void check_on_device(const Tensor& tensor, const std::string& what, const std::optional<Device>& own) {
    if (!own) {
        throw Error(Code::unsupported,
                    fmt::format("{} is on CUDA device {}, but the communicator has no transport for it; create it with "
                                "the backend 'cpu:auto,cuda:nccl'",
                                what, tensor.device.index));
    }
    if (tensor.device != *own) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} is on CUDA device {}, but this rank communicates from CUDA device {}", what,
                                tensor.device.index, own->index));
    }
    if (tensor.data == nullptr || tensor.size_bytes() == 0) return;
    try {
        device_api(*own).check_memory(tensor.data);
    } catch (const Error& error) {
        if (error.code() != Code::invalid_argument) throw;
        throw Error(Code::invalid_argument, fmt::format("{} {}", what, error.what()));
    }
}

void require_kernels_for(const std::string& what, Device device) {
    try {
        device_api(device).require_kernels();
    } catch (const Error& error) {
        if (error.code() != Code::unsupported) throw;
        throw Error(Code::unsupported, fmt::format("{} is not available here: {}", what, error.what()));
    }
}

}  // namespace tsr
