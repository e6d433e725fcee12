// Creates a communicator from the environment, under any launcher.
#pragma once

#include <memory>

#include "comm/communicator.hpp"

namespace tsr {

// Makes a communicator with these options answer requests of this process's agent and report its failure. Does nothing
// outside `tessera run`.
void attach_to_agent(CommOptions& options);

// Collective. The n-th call with a name in one process matches the n-th in the others. Throws INVALID_ARGUMENT
// (inconsistent environment), PERMISSION (token), TIMEOUT (rank 0 or another rank never joined), IO.
[[nodiscard]] std::shared_ptr<Communicator> communicator_from_environment(const CommOptions& options);

}  // namespace tsr
