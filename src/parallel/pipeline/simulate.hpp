// How long a schedule takes if every action takes its given time: the makespan, each rank's idle time, and the largest
// number of micro-batches whose activations a rank keeps at once. The units are the caller's.
#pragma once

#include <vector>

#include "base/function_ref.hpp"
#include "parallel/pipeline/schedule.hpp"

namespace tsr::pipeline {

struct Costs {
    double forward = 1;   // of one micro-batch of one stage
    double input = 1;     // I; B takes I + W
    double weight = 1;    // W
    double latency = 0;   // of a message between two ranks
    double transfer = 0;  // the time that a message occupies its link; messages of a link in one direction queue up
};

struct RankTimes {
    double busy = 0;
    double first = 0;  // when its first action begins
    double last = 0;   // when its last action ends
    int peak = 0;      // activations, in micro-batches of one stage; B or W frees one
};

struct Simulation {
    double makespan = 0;
    std::vector<RankTimes> ranks;

    // Of the rank that waits most: its time without work until the whole pipeline ends.
    [[nodiscard]] double idle() const;
    [[nodiscard]] int peak() const;
};

// `on_action(rank, index, begin, end)` is called for each action, in the order of each rank's list.
using OnAction = FunctionRef<void(int rank, size_t index, double begin, double end)>;

// `schedule` must be valid. Throws INVALID_ARGUMENT if the makespan is not finite.
[[nodiscard]] Simulation simulate(const Schedule& schedule, const Costs& costs, OnAction on_action);
[[nodiscard]] Simulation simulate(const Schedule& schedule, const Costs& costs = {});

// Runs all actions as soon as what they need is there. Returns how many actions of each rank have run: all of them, or,
// if the ranks wait for each other in a circle, those before the one at which it waits.
[[nodiscard]] std::vector<size_t> walk(const Schedule& schedule, const Costs& costs, OnAction on_action);

}  // namespace tsr::pipeline
