#include "launch/from_environment.hpp"

#include <fmt/format.h>

#include "launch/meeting.hpp"

namespace tsr {

std::shared_ptr<Communicator> communicator_from_environment(const CommOptions& options) {
    const JobEnvironment job = JobEnvironment::detect();
    if (job.world_size == 1) return Communicator::create(make_memory_store(options.timeout), 0, 1, options);
    const std::string prefix = fmt::format("env/{}/", next_meeting());
    auto store = prefixed(store_from_environment(job, options.timeout), prefix);
    return Communicator::create(std::move(store), job.rank, job.world_size, options);
}

}  // namespace tsr
