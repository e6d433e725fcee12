#include "launch/hosts/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace tsr {

namespace {

// "rank 4 (local 0)", "ranks 4-7 (local 0-3)"
std::string numbers(size_t first, size_t local, size_t count) {
    if (count == 1) return fmt::format("rank {} (local {})", first, local);
    return fmt::format("ranks {}-{} (local {}-{})", first, first + count - 1, local, local + count - 1);
}

// A word of a command as a person reads it; not for a shell.
std::string readable(const std::vector<std::string>& command) {
    std::string text;
    for (const std::string& word : command) {
        const bool plain = !word.empty() && word.find_first_of(" \t\n\"'\\") == std::string::npos;
        text += text.empty() ? "" : " ";
        if (plain) {
            text += word;
        } else {
            append_json_string(text, readable_utf8(word));
        }
    }
    return text;
}

}  // namespace

int LaunchPlan::world_size() const {
    int size = 0;
    for (const PlannedHost& host : hosts) size += static_cast<int>(host.ranks.size());
    return size;
}

std::string LaunchPlan::text() const {
    std::string text = fmt::format("{} rank{} on {} host{}\n", world_size(), world_size() == 1 ? "" : "s", hosts.size(),
                                   hosts.size() == 1 ? "" : "s");
    size_t rank = 0;
    for (size_t node = 0; node < hosts.size(); ++node) {
        const PlannedHost& host = hosts[node];
        text += fmt::format("node {}: {}", node, host.host);
        if (!host.devices.empty()) text += fmt::format("  CUDA_VISIBLE_DEVICES={}", fmt::join(host.devices, ","));
        text += '\n';
        for (size_t local = 0; local < host.ranks.size();) {
            const int program = host.ranks[local].program;
            size_t end = local;
            while (end < host.ranks.size() && host.ranks[end].program == program) ++end;
            text += fmt::format("  {}  {}\n", numbers(rank, local, end - local),
                                readable(programs[static_cast<size_t>(program)]));
            rank += end - local;
            local = end;
        }
    }
    return text;
}

Json LaunchPlan::json() const {
    const auto strings = [](const std::vector<std::string>& words) {
        Json::Array array;
        for (const std::string& word : words) array.emplace_back(readable_utf8(word));
        return array;
    };
    Json::Array commands;
    for (const std::vector<std::string>& command : programs) commands.emplace_back(strings(command));
    Json::Array nodes;
    int rank = 0;
    for (size_t node = 0; node < hosts.size(); ++node) {
        Json::Array ranks;
        for (size_t local = 0; local < hosts[node].ranks.size(); ++local) {
            const PlannedRank& planned = hosts[node].ranks[local];
            ranks.emplace_back(Json::Object{{"rank", rank++},
                                            {"local_rank", static_cast<int64_t>(local)},
                                            {"program", planned.program},
                                            {"slot", planned.slot < 0 ? Json() : Json(planned.slot)}});
        }
        nodes.emplace_back(Json::Object{{"host", hosts[node].host},
                                        {"node_rank", static_cast<int64_t>(node)},
                                        {"devices", strings(hosts[node].devices)},
                                        {"ranks", std::move(ranks)}});
    }
    return Json::Object{{"world_size", world_size()}, {"programs", std::move(commands)}, {"hosts", std::move(nodes)}};
}

LaunchPlan plan_of_slots(std::vector<std::string> command, const std::vector<HostSelection>& selected) {
    LaunchPlan plan;
    plan.programs.push_back(std::move(command));
    for (const HostSelection& selection : selected) {
        PlannedHost& host = plan.hosts.emplace_back();
        host.host = selection.host;
        for (const int slot : selection.slots) {
            host.ranks.push_back({0, slot});
            host.devices.push_back(std::to_string(slot));
        }
    }
    return plan;
}

LaunchPlan plan_of_programs(const std::vector<PlacedProgram>& programs) {
    LaunchPlan plan;
    for (const PlacedProgram& program : programs) {
        auto host = std::ranges::find(plan.hosts, program.host, &PlannedHost::host);
        if (host == plan.hosts.end()) host = plan.hosts.insert(plan.hosts.end(), PlannedHost{program.host, {}, {}});
        host->ranks.insert(host->ranks.end(), static_cast<size_t>(program.ranks),
                           PlannedRank{static_cast<int>(plan.programs.size()), -1});
        plan.programs.push_back(program.command);
    }
    return plan;
}

}  // namespace tsr
