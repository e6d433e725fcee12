// The flight records of a job's ranks, as communicators wrote them (comm/flight_recorder.hpp).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_recorder.hpp"

namespace tsr::cli {

struct Flown {
    uint64_t number = 0;
    FlightState state = FlightState::queued;
    uint64_t sequence = 0;
    Operation operation;
    // Microseconds since 1970; `ended` of what did not end is empty, `started` of what did not begin too.
    double issued = 0;
    std::optional<double> started;
    std::optional<double> ended;

    [[nodiscard]] bool begun() const { return started.has_value(); }
    [[nodiscard]] bool finished() const { return state == FlightState::finished; }
    [[nodiscard]] std::string headline() const { return tsr::headline(operation, sequence); }
};

// One rank's record of one communicator.
struct Flight {
    FlightOrigin origin;
    std::string host;
    int64_t pid = 0;
    std::string job;               // the launcher's, with its round; empty: not said
    uint64_t process_started = 0;  // tells processes of one pid apart; 0 in a record of an older library
    std::string error;             // what the communicator failed with; empty if it did not
    double written = 0;            // microseconds since 1970; 0 in a record of an older library
    std::vector<Flown> operations;

    // Of what is known: when it was written, else the last time of an operation.
    [[nodiscard]] double last_time() const;
};

// By the communicator's id, then by rank.
using Flights = std::map<std::string, std::map<int, Flight>>;

// The records of one job, or of one round of it: those of communicators that name it, or have processes in common.
struct Job {
    std::string directory;  // where they lie
    Flights flights;

    // By which `--job` names it: that of its largest communicator, and of those of the oldest one.
    [[nodiscard]] std::string id() const;
    [[nodiscard]] bool has(std::string_view id) const;  // of any of its communicators, or its beginning
    [[nodiscard]] size_t ranks() const;                 // of that communicator, that left records
    // When the last of its records was written, microseconds since 1970.
    [[nodiscard]] double last_time() const;
};

// The jobs in `directory` and in its `round-R`, which `tessera run` makes, the newest first: several jobs may have written
// into one directory. NOT_FOUND if there is no record, CORRUPT names the file and line that is none.
[[nodiscard]] std::vector<Job> read_jobs(const std::string& directory);

}  // namespace tsr::cli
