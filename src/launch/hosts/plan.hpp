// Who runs where: the ranks of a job by host, before anything is started.
#pragma once

#include <string>
#include <vector>

#include "base/json.hpp"
#include "launch/hosts/selection.hpp"

namespace tsr {

struct PlannedRank {
    int program = 0;  // index in LaunchPlan::programs
    int slot = -1;    // of its host; -1: none was chosen
};

struct PlannedHost {
    std::string host;
    std::vector<PlannedRank> ranks;    // by local rank
    std::vector<std::string> devices;  // CUDA_VISIBLE_DEVICES of its ranks; empty: it is left as it is
};

// Global ranks count through the hosts in order, and through the ranks of each.
struct LaunchPlan {
    std::vector<std::vector<std::string>> programs;  // command lines
    std::vector<PlannedHost> hosts;

    [[nodiscard]] int world_size() const;
    [[nodiscard]] std::string text() const;  // for people, with newlines
    // {"world_size", "programs": [[...]], "hosts": [{"host", "node_rank", "devices", "ranks": [{"rank", "local_rank",
    // "program", "slot"}]}]}; slot is null if none was chosen.
    [[nodiscard]] Json json() const;
};

// One rank of `command` for each slot, whose number is the id of its device.
[[nodiscard]] LaunchPlan plan_of_slots(std::vector<std::string> command, const std::vector<HostSelection>& selected);

// `ranks` ranks of a command on a host.
struct PlacedProgram {
    std::vector<std::string> command;
    int ranks = 1;
    std::string host;
};
// Hosts in the order in which they are first named; each runs its programs in their order.
[[nodiscard]] LaunchPlan plan_of_programs(const std::vector<PlacedProgram>& programs);

}  // namespace tsr
