// Which ranks of a round have ended: the agent writes it into the job's store, and who waits for the others to join reads
// it, so that a rank which ended without joining, with exit code 0 as well, is not waited for.
#pragma once

#include <vector>

#include "comm/communicator.hpp"
#include "store/store.hpp"

namespace tsr {

// "exited with status 0", "was killed by SIGKILL"
[[nodiscard]] Departure departure_of(int rank, int wait_status);

// The whole list; it replaces the former one. Throws what a store throws.
void tell_departures(Store& store, const std::vector<Departure>& departures, Deadline deadline);

[[nodiscard]] std::vector<Departure> read_departures(Store& store, Deadline deadline);

}  // namespace tsr
