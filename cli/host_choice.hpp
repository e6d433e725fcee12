// Which hosts, slots and devices a job uses: what the options of `tessera run` and `tessera deepspeed` choose.
#pragma once

#include <string>
#include <vector>

#include "launch/hosts/plan.hpp"
#include "launch/hosts/selection.hpp"

namespace tsr::cli {

struct HostChoice {
    std::string hostfile;  // empty: none was named
    Filter filter;
};

[[nodiscard]] int gpus();  // NVIDIA GPUs of this machine

// One rank of `command` for each chosen slot. Without a hostfile the only host is localhost; its slots are the devices
// that are visible here, or the usable cores if there is none. If a single host is chosen, this machine runs it, and its
// slots are mapped to the visible devices. Throws UsageError.
[[nodiscard]] LaunchPlan plan_of(const HostChoice& choice, std::vector<std::string> command);

void print_plan(const LaunchPlan& plan, bool as_json);

}  // namespace tsr::cli
