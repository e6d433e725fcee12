// What /proc tells of processes and of this host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tsr {

[[nodiscard]] std::string first_line(const std::string& path);  // empty if there is no such file
[[nodiscard]] std::string boot_id();                            // another one after each start of the host

struct ProcessStat {
    char state = '\0';        // as /proc/PID/stat writes it: T and t are stopped, Z and X dead
    int64_t parent = 0;       // its pid
    bool ending = false;      // it has begun to exit, or is dead
    uint64_t start_time = 0;  // in clock ticks since the host started
};

// nullopt: there is no such process.
[[nodiscard]] std::optional<ProcessStat> process_stat(int64_t pid);
[[nodiscard]] std::optional<uint64_t> process_start_time(int64_t pid);
// Whether a process is stopped by a signal or a debugger.
[[nodiscard]] bool process_is_stopped(int64_t pid);

}  // namespace tsr
