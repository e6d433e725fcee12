// The variables of torchrun that depend on the options of the job and on the other ranks.
#pragma once

#include <vector>

#include "launch/job.hpp"
#include "launch/variables.hpp"

namespace tsr {

// Sets the role's variables of the member `rank`, and what --signals-to-handle and --virtual-local-rank ask for. Throws
// INVALID_ARGUMENT if CUDA_VISIBLE_DEVICES lists too few devices for one each.
void set_torchrun_variables(Variables& variables, const RunOptions& options, const std::vector<RankIdentity>& members,
                            int rank, int local_rank);

}  // namespace tsr
