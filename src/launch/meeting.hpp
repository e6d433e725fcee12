// Where the ranks of a process's environment meet: an agent's store, or one that rank 0 serves from the first call
// until its process ends, so that later communicators and slow peers still find it. A process may be a rank of several
// jobs in turn, like the workers of Ray and Spark: when its environment names another job, it joins that job's store.
#pragma once

#include <memory>

#include "launch/environment.hpp"
#include "store/store.hpp"

namespace tsr {

// Serves or connects; all callers in a process share the client. Thread-safe. Throws PERMISSION (token), TIMEOUT (rank
// 0 was not found), IO (no free port).
[[nodiscard]] std::shared_ptr<Store> store_from_environment(const JobEnvironment& job, milliseconds timeout);

}  // namespace tsr
