#include "base/proc.hpp"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>

namespace tsr {

namespace {

constexpr uint64_t exiting_flag = 4;  // PF_EXITING of the kernel's sched.h

// Whether /proc shows the processes of this pid namespace. One mounted for another namespace has other processes under these
// numbers.
bool proc_is_own() {
    std::array<char, 32> target{};
    const ssize_t size = ::readlink("/proc/self", target.data(), target.size());
    return size > 0 && std::string_view(target.data(), static_cast<size_t>(size)) == std::to_string(::getpid());
}

}  // namespace

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

std::string boot_id() { return first_line("/proc/sys/kernel/random/boot_id"); }

std::optional<ProcessStat> process_stat(int64_t pid) {
    if (!proc_is_own()) return std::nullopt;
    const std::string line = first_line(fmt::format("/proc/{}/stat", pid));
    // The second field, the command, is in brackets and may contain anything, so count from the last bracket.
    const size_t bracket = line.rfind(')');
    if (bracket == std::string::npos) return std::nullopt;
    std::istringstream fields(line.substr(bracket + 1));
    ProcessStat stat;
    fields >> stat.state >> stat.parent;
    std::string skipped;
    for (int field = 5; field < 9; ++field) fields >> skipped;
    uint64_t flags = 0;
    fields >> flags;
    stat.ending = (flags & exiting_flag) != 0;
    for (int field = 10; field < 20; ++field) fields >> skipped;
    fields >> stat.threads >> skipped;
    if (!(fields >> stat.start_time)) return std::nullopt;
    return stat;
}

std::optional<uint64_t> process_start_time(int64_t pid) {
    const auto stat = process_stat(pid);
    return stat ? std::optional(stat->start_time) : std::nullopt;
}

bool process_is_gone(int64_t pid) {
    if (pid <= 0 || pid > INT32_MAX) return false;
    return ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
}

bool process_handles(int64_t pid, int signal) {
    std::ifstream file(fmt::format("/proc/{}/status", pid));
    for (std::string line; std::getline(file, line);) {
        if (!line.starts_with("SigCgt:")) continue;
        const uint64_t handled = std::strtoull(line.c_str() + 7, nullptr, 16);
        return (handled >> (signal - 1) & 1) != 0;
    }
    return false;
}

bool process_is_stopped(int64_t pid) {
    const auto stat = process_stat(pid);
    return stat && (stat->state == 'T' || stat->state == 't');
}

}  // namespace tsr
