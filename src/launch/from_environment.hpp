// From the environment to a communicator, under any launcher.
#pragma once

#include <memory>

#include "comm/communicator.hpp"
#include "comm/flight_requests.hpp"

namespace tsr {

// Of this process's agent, for all its communicators, from now on; nullptr without `tessera run`.
[[nodiscard]] std::shared_ptr<FlightRequests> flight_requests();

// Collective. The n-th call of one name in one process meets the n-th in the others. Throws INVALID_ARGUMENT (the environment
// is contradictory), PERMISSION (token), TIMEOUT (rank 0 or another rank never came), IO.
[[nodiscard]] std::shared_ptr<Communicator> communicator_from_environment(const CommOptions& options);

}  // namespace tsr
