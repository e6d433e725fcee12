#include "parallel/pipeline/placement.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "base/error.hpp"

namespace tsr::pipeline {

namespace {

// A message lists a few of what may be many.
constexpr size_t shown = 4;

std::string listed(const std::vector<std::string>& faults) {
    std::string text;
    for (size_t i = 0; i < std::min(faults.size(), shown); ++i) text += (i == 0 ? "" : "; ") + faults[i];
    if (faults.size() > shown) text += fmt::format("; and {} more", faults.size() - shown);
    return text;
}

}  // namespace

void check_edges(const std::vector<Edge>& edges, int stages) {
    for (size_t i = 0; i < edges.size(); ++i) {
        const Edge& edge = edges[i];
        const auto refuse = [&](const std::string& why) {
            throw Error(Code::invalid_argument, fmt::format("edge {}, output {} of stage {} to stage {}: {}", i,
                                                            edge.output, edge.from, edge.to, why));
        };
        if (edge.from < 0 || edge.to >= stages) refuse(fmt::format("there are stages 0 to {}", stages - 1));
        if (edge.from >= edge.to) refuse("it must go to a later stage");
        if (edge.output < 0 || edge.output >= static_cast<int>(max_bundle_tensors)) {
            refuse(fmt::format("outputs have numbers from 0 to {}", max_bundle_tensors - 1));
        }
        if (std::find(edges.begin(), edges.begin() + static_cast<std::ptrdiff_t>(i), edge) !=
            edges.begin() + static_cast<std::ptrdiff_t>(i)) {
            refuse("it is there twice");
        }
    }
}

void check_placement(const Schedule& schedule, std::string_view name, const std::vector<std::vector<int>>& stages_of) {
    std::map<int, std::vector<int>> ranks_of;
    for (size_t rank = 0; rank < stages_of.size(); ++rank) {
        for (const int stage : stages_of[rank]) ranks_of[stage].push_back(static_cast<int>(rank));
    }
    std::vector<std::string> faults;
    for (int stage = 0; stage < schedule.stages(); ++stage) {
        if (!ranks_of.contains(stage)) {
            faults.push_back(fmt::format("stage {} is missing; it belongs to rank {}", stage,
                                         schedule.rank_of_stage[static_cast<size_t>(stage)]));
        }
    }
    for (const auto& [stage, ranks] : ranks_of) {
        if (stage < 0 || stage >= schedule.stages()) {
            faults.push_back(fmt::format("stage {} of rank {} does not exist", stage, ranks[0]));
            continue;
        }
        if (ranks.size() > 1) {
            faults.push_back(fmt::format("stage {} is on rank {} and on rank {}", stage, ranks[0], ranks[1]));
            continue;
        }
        const int right = schedule.rank_of_stage[static_cast<size_t>(stage)];
        if (ranks[0] != right)
            faults.push_back(fmt::format("stage {} is on rank {}; it belongs to rank {}", stage, ranks[0], right));
    }
    if (faults.empty()) return;
    throw Error(Code::invalid_argument, fmt::format("{} has the stages 0 to {}, each on one rank: {}", name,
                                                    schedule.stages() - 1, listed(faults)));
}

std::vector<Route> routes_of(const Schedule& schedule, const std::vector<Edge>& edges) {
    const auto route = [&](int from, int to) {
        return Route{from, to, schedule.rank_of_stage[static_cast<size_t>(from)],
                     schedule.rank_of_stage[static_cast<size_t>(to)]};
    };
    std::vector<Route> routes;
    for (int stage = 0; stage + 1 < schedule.stages(); ++stage) routes.push_back(route(stage, stage + 1));
    for (const Edge& edge : edges) routes.push_back(route(edge.from, edge.to));
    return routes;
}

}  // namespace tsr::pipeline
