// Which ranks of a round have ended. The agent writes this into the job's store, and ranks that wait for others to join
// read it, so that nobody waits for a rank that ended without joining, even with exit code 0.
#pragma once

#include <vector>

#include "comm/communicator.hpp"
#include "store/store.hpp"

namespace tsr {

// "exited with status 0", "was killed by SIGKILL"
[[nodiscard]] Departure departure_of(int rank, int wait_status);

// Writes the complete list, replacing the previous one. Throws what a store throws.
void tell_departures(Store& store, const std::vector<Departure>& departures, Deadline deadline);

[[nodiscard]] std::vector<Departure> read_departures(Store& store, Deadline deadline);

}  // namespace tsr
