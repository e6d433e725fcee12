// The variables of torchrun that depend on the options of the job and on the other ranks.
#pragma once

#include "launch/job.hpp"
#include "launch/node_message.hpp"
#include "launch/variables.hpp"

namespace tsr {

// Sets the role's variables of the rank in `seat`, and what --signals-to-handle and --virtual-local-rank ask for. Throws
// INVALID_ARGUMENT if CUDA_VISIBLE_DEVICES lists too few devices for one each.
void set_torchrun_variables(Variables& variables, const RunOptions& options, const Seat& seat, int local_rank);

}  // namespace tsr
