// Hostfiles as DeepSpeed, Horovod and Open MPI read them: a host per line, "worker-1 slots=4". Slots are the devices of
// the machine, numbered from 0; not how many of them a job uses.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tsr {

inline constexpr int max_slots = 4096;  // of a host
inline constexpr size_t max_hosts = 4096;
inline constexpr size_t max_hostfile_bytes = size_t{1} << 20;

struct HostSlots {
    std::string host;
    int slots = 0;
    friend bool operator==(const HostSlots&, const HostSlots&) = default;
};

// In the file's order. Empty lines and lines that begin with '#' are skipped, and so is what follows the number of slots
// ("max_slots=8"). Throws INVALID_ARGUMENT naming `path` and the line: a bad entry, a host that is there twice, a name
// that is refused (host_name.hpp), more slots, hosts or bytes than the limits above; and if no host is left.
[[nodiscard]] std::vector<HostSlots> parse_hostfile(std::string_view text, const std::string& path);

// Throws NOT_FOUND if the file does not exist, else IO or PERMISSION if it cannot be read.
[[nodiscard]] std::vector<HostSlots> read_hostfile(const std::string& path);

}  // namespace tsr
