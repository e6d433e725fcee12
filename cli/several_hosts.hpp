// A job that one command starts on several hosts: an agent on each, through ssh except on this host.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "launch/hosts/exported_environment.hpp"
#include "launch/hosts/plan.hpp"

namespace tsr::cli {

struct SeveralHosts {
    LaunchPlan plan;
    bool is_placed = false;            // the words say how many ranks each host has (-n N@HOST)
    std::vector<std::string> options;  // of `tessera run`, for every host
    std::vector<std::string> program;  // the words after them
    // The variables of a host's ranks besides those that are exported, by node rank; empty: none.
    std::function<Assignments(size_t host)> environment;
    std::string master_address;   // empty: the first host's name
    int master_port = 0;          // where the agents meet; 0: one that follows from the job's random id
    std::optional<int> ssh_port;  // nullopt: ssh's own
    std::vector<int> stop_signals;
    milliseconds patience{0};  // that the agents may need to end
    bool insecure = false;
};

// Returns the job's exit code. Throws INVALID_ARGUMENT for hosts and texts that ssh cannot carry.
[[nodiscard]] int run_on_hosts(const SeveralHosts& job);

// Becomes the agent of host `node`, which meets the others at the job's address and port. They are started by hand.
[[noreturn]] void become_agent(const SeveralHosts& job, size_t node);

[[nodiscard]] bool is_this_host(const std::string& name);

}  // namespace tsr::cli
