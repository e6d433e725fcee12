// The order of each schedule, one function each. Local to schedule.cc.
#pragma once

#include <vector>

#include "parallel/pipeline/schedule.hpp"

namespace tsr::pipeline {

// One rank's place in the pipeline.
struct Seat {
    int ranks;
    int rank;
    int stages_per_rank;
    int microbatches;
};

using Order = std::vector<Action>;

[[nodiscard]] Order gpipe(const Seat& seat);
[[nodiscard]] Order one_f_one_b(const Seat& seat);
[[nodiscard]] Order looped_bfs(const Seat& seat);
[[nodiscard]] Order interleaved(const Seat& seat);
[[nodiscard]] Order interleaved_zero_bubble(const Seat& seat);
[[nodiscard]] Order zb_h2(const Seat& seat);
[[nodiscard]] Order zbv(const Seat& seat);
[[nodiscard]] Order dual_pipe_v(const Seat& seat);

// The micro-batches of one round of an interleaved schedule; 0 if they do not divide into rounds.
[[nodiscard]] int round_of(int ranks, int microbatches);

}  // namespace tsr::pipeline
