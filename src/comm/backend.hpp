// Which transport a backend string asks for: "auto", "shm", "gloo", or a list with a backend for each device, as PyTorch
// writes it: "cpu:gloo".
#pragma once

#include <string>
#include <string_view>

namespace tsr {

// The backend between CPUs: "auto", "shm" or "gloo". Throws UNSUPPORTED for what only a GPU could do, INVALID_ARGUMENT for
// what nothing could.
[[nodiscard]] std::string cpu_backend(std::string_view text);

}  // namespace tsr
