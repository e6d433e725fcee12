// From the environment to a communicator, under any launcher.
#pragma once

#include <memory>

#include "comm/communicator.hpp"

namespace tsr {

// Lets a communicator with these options answer to this process's agent and report its failure. Nothing without `tessera run`.
void attach_to_agent(CommOptions& options);

// Collective. The n-th call of one name in one process meets the n-th in the others. Throws INVALID_ARGUMENT (the environment
// is contradictory), PERMISSION (token), TIMEOUT (rank 0 or another rank never came), IO.
[[nodiscard]] std::shared_ptr<Communicator> communicator_from_environment(const CommOptions& options);

}  // namespace tsr
