// Parses a backend string: "auto", "shm", "gloo", or PyTorch's list of one backend per device ("cpu:gloo").
#pragma once

#include <string>
#include <string_view>

namespace tsr {

// The backend for CPUs: "auto" (also for an empty text), "shm" or "gloo". Throws UNSUPPORTED for a GPU backend,
// INVALID_ARGUMENT for an unknown one.
[[nodiscard]] std::string cpu_backend(std::string_view text);

}  // namespace tsr
