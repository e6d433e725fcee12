// Where the stages of a pipeline are, and what joins them.
#pragma once

#include <string>
#include <vector>

#include "parallel/pipeline/messages.hpp"
#include "parallel/pipeline/schedule.hpp"

namespace tsr::pipeline {

// Output `output` of stage `from` goes to stage `to`, and only along such edges; other outputs go to the next stage.
struct Edge {
    int from = 0;
    int output = 0;
    int to = 0;

    bool operator==(const Edge&) const = default;
};

// Throws INVALID_ARGUMENT for an edge that does not go forward between two stages, or that is there twice.
void check_edges(const std::vector<Edge>& edges, int stages);

// `stages_of` has the stages of each rank, in any order. Throws INVALID_ARGUMENT, which names stages that are missing,
// on several ranks, or not where the schedule puts them.
void check_placement(const Schedule& schedule, std::string_view name, const std::vector<std::vector<int>>& stages_of);

// Edge i joins stages i and i + 1; after those come `edges`.
[[nodiscard]] std::vector<Route> routes_of(const Schedule& schedule, const std::vector<Edge>& edges);

}  // namespace tsr::pipeline
