#include "comm/host.hpp"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <vector>

#include <fmt/core.h>

#include "base/proc.hpp"

namespace tsr {

namespace {

// 0: unknown. Callers ask for this thread's name spaces: the first thread of the process may have ended.
uint64_t inode_of(const char* path) {
    struct stat status{};
    return ::stat(path, &status) == 0 ? status.st_ino : 0;
}

// This process's control group (version 2) and those around it, innermost first.
std::vector<std::string> control_groups() {
    std::vector<std::string> directories;
    std::string path = first_line("/proc/self/cgroup");
    if (path.rfind("0::", 0) != 0) return directories;
    path = path.substr(3);
    while (true) {
        directories.push_back("/sys/fs/cgroup" + path);
        const size_t slash = path.rfind('/');
        if (slash == std::string::npos || path == "/") return directories;
        path.resize(slash);
    }
}

// Cores granted by "cpu.max" ("200000 100000", or "max 100000"): the smallest of all.
std::optional<double> cgroup_quota() {
    std::optional<double> smallest;
    for (const std::string& directory : control_groups()) {
        std::istringstream text(first_line(directory + "/cpu.max"));
        double quota = 0;
        double period = 0;
        if (text >> quota >> period && period > 0)
            smallest = std::min(smallest.value_or(quota / period), quota / period);
    }
    return smallest;
}

// Bytes of file cache of a control group, which the kernel reclaims when memory is short.
uint64_t file_cache(const std::string& directory) {
    std::ifstream file(directory + "/memory.stat");
    uint64_t total = 0;
    uint64_t value = 0;
    for (std::string name; file >> name >> value;) {
        if (name == "active_file" || name == "inactive_file") total += value;
    }
    return total;
}

}  // namespace

std::string host_id(const std::string& given_id) {
    if (!given_id.empty()) return given_id;
    if (const char* given = std::getenv("TESSERA_HOST_ID"); given != nullptr && *given != '\0') return given;
    const std::string boot = boot_id();
    const uint64_t network = inode_of("/proc/thread-self/ns/net");
    if (boot.empty() || pid_namespace() == 0 || network == 0) {
        // Without /proc nobody can tell which host this is: every process is on its own.
        static const std::string alone = [] {
            std::random_device random;
            return fmt::format("unknown:{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
        }();
        return alone;
    }
    return fmt::format("{}:{}:{}", boot, pid_namespace(), network);
}

std::string host_name() {
    char name[65] = {};
    return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

uint64_t pid_namespace() { return inode_of("/proc/thread-self/ns/pid"); }

int usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    // The call fails if there are more cores than the set can hold (1024).
    int cores = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                              : static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
    if (const auto quota = cgroup_quota()) cores = std::min(cores, static_cast<int>(*quota + 0.5));
    return std::max(cores, 1);
}

std::optional<uint64_t> available_memory() {
    std::optional<uint64_t> available;
    std::ifstream file("/proc/meminfo");
    std::string name;
    uint64_t kib = 0;
    std::string rest;
    while (file >> name >> kib && std::getline(file, rest)) {
        if (name == "MemAvailable:") available = kib * 1024;
    }
    for (const std::string& directory : control_groups()) {
        uint64_t limit = 0;
        uint64_t used = 0;
        std::istringstream limit_text(first_line(directory + "/memory.max"));  // "max": no number, no limit
        std::istringstream used_text(first_line(directory + "/memory.current"));
        if (!(limit_text >> limit) || !(used_text >> used)) continue;
        used -= std::min(used, file_cache(directory));
        const uint64_t left = limit > used ? limit - used : 0;
        available = std::min(available.value_or(left), left);
    }
    return available;
}

}  // namespace tsr
