// Properties of this process and host that decide how ranks reach each other and how they wait.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tsr {

// Equal for two processes that can reach each other's memory: boot id, pid namespace and network namespace; without /proc,
// unique to the process. Overridden by TESSERA_HOST_ID and by a non-empty `given_id` (CommOptions::host_id).
[[nodiscard]] std::string host_id(const std::string& given_id = {});
[[nodiscard]] std::string host_name();
[[nodiscard]] uint64_t pid_namespace();

// Number of cores that this process may use: its affinity mask, limited by the quota of its control group; at least 1.
[[nodiscard]] int usable_cores();

// Bytes of memory available without swapping; nullopt if unknown.
[[nodiscard]] std::optional<uint64_t> available_memory();

}  // namespace tsr
