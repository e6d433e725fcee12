// Runs a function in one forked process a rank, over a fresh directory for the rendezvous. Returns 0 if all did. With
// BENCH_HOSTS=n the ranks are on n hosts, as many on each, which are network name spaces (tests/netns/networks.hpp) whose
// links have the rate BENCH_RATE, if it is set.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "netns/networks.hpp"

namespace bench {

inline int fork_ranks(int ranks, const std::function<int(int rank, const std::string& directory)>& body) {
    std::string directory = (std::filesystem::temp_directory_path() / "tessera-bench-XXXXXX").string();
    if (mkdtemp(directory.data()) == nullptr) return 1;
    std::optional<tsr::testing::Networks> networks;
    const char* hosts_text = std::getenv("BENCH_HOSTS");
    const int hosts = hosts_text == nullptr ? 0 : std::atoi(hosts_text);
    if (hosts > 0) {
        const char* rate = std::getenv("BENCH_RATE");
        networks.emplace(hosts, rate == nullptr ? "" : rate);
        setenv("TESSERA_SOCKET_IFNAME", "eth0", 1);
    }
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks; ++rank) {
        const pid_t pid = fork();
        if (pid == 0) {
            if (networks) networks->enter_host(rank * hosts / ranks);
            _exit(body(rank, directory));
        }
        children.push_back(pid);
    }
    int failed = 0;
    for (const pid_t pid : children) {
        int status = 0;
        waitpid(pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) failed = 1;
    }
    std::filesystem::remove_all(directory);
    return failed;
}

// What the ranks reach each other by.
inline const char* interface() { return std::getenv("BENCH_HOSTS") == nullptr ? "lo" : "eth0"; }

}  // namespace bench
