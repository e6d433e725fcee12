// Information from /proc about processes and this host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tsr {

[[nodiscard]] std::string first_line(const std::string& path);  // empty if there is no such file
[[nodiscard]] std::string boot_id();                            // changes with each boot of the host

struct ProcessStat {
    char state = '\0';        // as /proc/PID/stat writes it: T and t are stopped, Z and X dead
    int64_t parent = 0;       // its pid
    bool ending = false;      // it is exiting, or dead
    int64_t threads = 0;      // a process whose first thread has ended is a Z (zombie), but lives on in the others
    uint64_t start_time = 0;  // in clock ticks since the host started, by the clock of this time namespace

    [[nodiscard]] bool dead() const { return (state == 'Z' || state == 'X') && threads <= 1; }
};

// nullopt if the process does not exist or cannot be seen, as where /proc belongs to another pid namespace.
[[nodiscard]] std::optional<ProcessStat> process_stat(int64_t pid);
[[nodiscard]] std::optional<uint64_t> process_start_time(int64_t pid);
// Whether no process has this pid. Works even if /proc hides processes (hidepid).
[[nodiscard]] bool process_is_gone(int64_t pid);
// Whether a process has a handler for a signal.
[[nodiscard]] bool process_handles(int64_t pid, int signal);
// Whether a process is stopped by a signal or a debugger.
[[nodiscard]] bool process_is_stopped(int64_t pid);

}  // namespace tsr
