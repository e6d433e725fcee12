#include "host_choice.hpp"

#include <fmt/core.h>

#include <cstdlib>
#include <filesystem>
#include <iterator>

#include "base/error.hpp"
#include "base/refuse.hpp"
#include "comm/host.hpp"
#include "command_line.hpp"

namespace tsr::cli {

namespace {

LaunchPlan planned(const HostChoice& choice, std::vector<std::string> command) {
    const char* const variable = std::getenv("CUDA_VISIBLE_DEVICES");
    const std::vector<std::string> visible = visible_devices(gpus(), variable);
    std::vector<HostSlots> hosts;
    std::string source = "hostfile " + choice.hostfile;
    if (!choice.hostfile.empty()) {
        hosts = read_hostfile(choice.hostfile);
    } else {
        if (choice.filter.num_nodes > 1) {
            refuse("--num_nodes {}: no hostfile names the hosts; add --hostfile", choice.filter.num_nodes);
        }
        hosts = {{"localhost", visible.empty() ? usable_cores() : static_cast<int>(visible.size())}};
        source = visible.empty() ? "this machine, which has no visible GPU: a slot per usable core" : "this machine";
    }
    const std::vector<HostSelection> selected = select_hosts(hosts, choice.filter, source);
    LaunchPlan plan = plan_of_slots(std::move(command), selected);
    if (plan.hosts.size() > 1) return plan;
    std::vector<std::string>& devices = plan.hosts.front().devices;
    if (!visible.empty()) {
        devices = devices_of(selected.front(), visible);
    } else if (choice.hostfile.empty() || variable != nullptr) {
        devices.clear();
    }
    return plan;
}

}  // namespace

int gpus() {
    std::error_code failure;
    const std::filesystem::directory_iterator list("/proc/driver/nvidia/gpus", failure);
    return failure ? 0 : static_cast<int>(std::distance(list, {}));
}

LaunchPlan plan_of(const HostChoice& choice, std::vector<std::string> command) {
    try {
        return planned(choice, std::move(command));
    } catch (const Error& error) {
        throw UsageError(error.what());
    }
}

void print_plan(const LaunchPlan& plan, bool as_json) {
    if (as_json) {
        fmt::print("{}\n", plan.json().dump());
    } else {
        fmt::print("{}", plan.text());
    }
}

}  // namespace tsr::cli
