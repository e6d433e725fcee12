// Drawings of a simulated pipeline schedule: text for a terminal, SVG, a trace for ui.perfetto.dev, and JSON.
#pragma once

#include <string>
#include <vector>

#include "parallel/pipeline/simulate.hpp"

namespace tsr::cli {

struct Drawn {
    std::string name;
    pipeline::Schedule schedule;
    pipeline::Costs costs;
    pipeline::Simulation result;

    struct Span {
        double begin;
        double end;
    };
    std::vector<std::vector<Span>> spans;  // for each rank, of its actions
};

[[nodiscard]] Drawn drawn(std::string name, pipeline::Schedule schedule, const pipeline::Costs& costs);

// "makespan 51, idle 3 (5.9 %), peak 8 activations": of the ranks with most.
[[nodiscard]] std::string summary_of(const Drawn& drawn);

struct TextStyle {
    size_t width = 120;  // longer rows continue below all ranks
    bool colours = false;
};
// A row per rank, to scale: a cell is as long as the shortest action.
[[nodiscard]] std::string text_of(const Drawn& drawn, const TextStyle& style);
[[nodiscard]] std::string svg_of(const Drawn& drawn);
[[nodiscard]] std::string trace_of(const Drawn& drawn);  // one unit of time is a millisecond
[[nodiscard]] std::string json_of(const Drawn& drawn);

}  // namespace tsr::cli
