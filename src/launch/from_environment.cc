#include "launch/from_environment.hpp"

#include "launch/meeting.hpp"

namespace tsr {

std::shared_ptr<Communicator> communicator_from_environment(const CommOptions& options) {
    const JobEnvironment job = JobEnvironment::detect();
    if (job.world_size == 1) return Communicator::create(make_memory_store(options.timeout), 0, 1, options);
    return Communicator::create(store_from_environment(job, options.timeout), job.rank, job.world_size, options);
}

}  // namespace tsr
