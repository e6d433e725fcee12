#include "launch/from_environment.hpp"

#include "launch/departures.hpp"
#include "launch/meeting.hpp"

namespace tsr {

std::shared_ptr<Communicator> communicator_from_environment(const CommOptions& options) {
    const JobEnvironment job = JobEnvironment::detect();
    if (job.world_size == 1) return Communicator::create(make_memory_store(options.timeout), 0, 1, options);
    const std::shared_ptr<Store> store = store_from_environment(job, options.timeout);
    Departures departures;
    if (job.launcher == Launcher::tessera) {
        departures = [store] { return read_departures(*store, store->default_deadline()); };
    }
    return Communicator::create(store, job.rank, job.world_size, options, departures);
}

}  // namespace tsr
