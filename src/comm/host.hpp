// Facts of this process and host that decide how ranks reach each other and how they wait.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tsr {

// Equal for two processes that can reach each other's memory: boot id, pid and network name space; TESSERA_HOST_ID
// overrides it, and so does a given one that is not empty (CommOptions::host_id).
[[nodiscard]] std::string host_id(const std::string& given_id = {});
[[nodiscard]] std::string host_name();
[[nodiscard]] uint64_t pid_namespace();

// Cores that this process may use: its affinity mask, cut by the quota of its control group; at least 1.
[[nodiscard]] int usable_cores();

// Bytes of memory that could be had without swapping; nullopt if the system does not tell.
[[nodiscard]] std::optional<uint64_t> available_memory();

}  // namespace tsr
