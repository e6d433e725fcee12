// Parses a backend string: "auto", "shm", "gloo", "nccl", or PyTorch's list of one backend per device ("cpu:gloo,cuda:nccl").
#pragma once

#include <string>
#include <string_view>

namespace tsr {

struct Backends {
    std::string cpu = "auto";  // "auto", "shm" or "gloo"
    bool nccl = false;         // for tensors on CUDA devices

    friend bool operator==(const Backends&, const Backends&) = default;
};

// An empty text is "auto". Throws INVALID_ARGUMENT for what is unknown or named twice.
[[nodiscard]] Backends backends_of(std::string_view text);

}  // namespace tsr
