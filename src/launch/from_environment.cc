#include "launch/from_environment.hpp"

#include <cstring>
#include <utility>

#include "comm/flight_requests.hpp"
#include "launch/agent_page.hpp"
#include "launch/departures.hpp"
#include "launch/meeting.hpp"

namespace tsr {

namespace {

// Those of the agent of `tessera run`, from now on.
std::shared_ptr<FlightRequests> flight_requests() {
    const AgentWords* words = agent_words();
    if (words == nullptr) return nullptr;
    return std::make_shared<FlightRequests>(
        [words, seen = words->flights.load(std::memory_order_acquire)]() mutable -> std::optional<std::string> {
            const uint32_t now = words->flights.load(std::memory_order_acquire);
            if (std::exchange(seen, now) == now) return std::nullopt;
            const auto& name = words->flight_directory;
            return std::string(name.data(), ::strnlen(name.data(), name.size()));
        });
}

}  // namespace

std::shared_ptr<Communicator> communicator_from_environment(const CommOptions& asked) {
    const JobEnvironment job = JobEnvironment::detect();
    CommOptions options = asked;
    options.flight_requests = flight_requests();
    if (job.world_size == 1) return Communicator::create(make_memory_store(options.timeout), 0, 1, options);
    const std::shared_ptr<Store> store = store_from_environment(job, options.timeout);
    Departures departures;
    if (job.launcher == Launcher::tessera) {
        departures = [store] { return read_departures(*store, store->default_deadline()); };
    }
    return Communicator::create(store, job.rank, job.world_size, options, departures);
}

}  // namespace tsr
