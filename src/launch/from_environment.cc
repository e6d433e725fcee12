#include "launch/from_environment.hpp"

#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/env.hpp"
#include "comm/flight_requests.hpp"
#include "comm/seats.hpp"
#include "launch/agent_page.hpp"
#include "launch/departures.hpp"
#include "launch/error_file.hpp"
#include "launch/meeting.hpp"
#include "launch/meter_pages.hpp"

namespace tsr {

namespace {

// The requests of this process's agent from now on, shared by all communicators of the process.
std::shared_ptr<FlightRequests> flight_requests() {
    const AgentWords* words = agent_words();
    if (words == nullptr) return nullptr;
    static std::mutex mutex;                          // guards what follows
    static std::weak_ptr<FlightRequests> of_process;  // the communicators hold it
    const std::lock_guard lock(mutex);
    std::shared_ptr<FlightRequests> requests = of_process.lock();
    if (requests && !requests->in_child()) return requests;
    requests = std::make_shared<FlightRequests>(
        [words, seen = words->flights.load(std::memory_order_acquire)]() mutable -> std::optional<std::string> {
            const uint32_t now = words->flights.load(std::memory_order_acquire);
            if (std::exchange(seen, now) == now) return std::nullopt;
            const auto& name = words->flight_directory;
            return std::string(name.data(), ::strnlen(name.data(), name.size()));
        });
    of_process = requests;
    return requests;
}

}  // namespace

void attach_to_agent(CommOptions& options) {
    count_for_agent();
    options.flight_requests = flight_requests();
    if (env_text("TESSERA_FAILURE_FILE")) options.on_failure = record_failure;
}

std::shared_ptr<Communicator> communicator_from_environment(const CommOptions& asked) {
    const JobEnvironment job = JobEnvironment::detect();
    CommOptions options = asked;
    attach_to_agent(options);
    if (job.world_size == 1) return Communicator::create(make_memory_store(options.timeout), 0, 1, options);
    const std::shared_ptr<Store> store = store_from_environment(job, options.timeout);
    Departures departures;
    if (job.launcher == Launcher::tessera) {
        departures = [store] { return read_departures(*store, store->default_deadline()); };
    }
    if (job.replacement) {
        return create_replaceable(store, job.rank, job.world_size, *job.replacement, options, departures);
    }
    return Communicator::create(store, job.rank, job.world_size, options, departures);
}

}  // namespace tsr
