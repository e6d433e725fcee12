// Where the ranks of a process's environment meet: an agent's store, or one that rank 0 serves from the first call to the
// end of its process, so that later communicators and slow peers still find it. A process may be a rank of one job after
// another, as the workers of Ray and Spark are: when its environment tells of another job, it meets there.
#pragma once

#include <memory>

#include "launch/environment.hpp"
#include "store/store.hpp"

namespace tsr {

// Serves or connects; all callers of a process share the client. Throws PERMISSION (token), TIMEOUT (rank 0 never
// came), IO (no free port).
[[nodiscard]] std::shared_ptr<Store> store_from_environment(const JobEnvironment& job, milliseconds timeout);

}  // namespace tsr
