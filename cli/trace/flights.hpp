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
    // Microseconds since 1970; `started` and `ended` are empty for operations that have not started or ended.
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
    std::string job;               // the launcher's job and round; empty if unknown
    uint64_t process_started = 0;  // distinguishes processes with the same pid; 0 in a record of an older library
    std::string error;             // the communicator's error; empty if it has not failed
    double written = 0;            // microseconds since 1970; 0 in a record of an older library
    std::vector<Flown> operations;

    // When the record was written; if unknown, the latest time of an operation.
    [[nodiscard]] double last_time() const;
};

// By the communicator's id, then by rank.
using Flights = std::map<std::string, std::map<int, Flight>>;

// The records of one job, or of one round of it: those of communicators that name it or share processes.
struct Job {
    std::string directory;  // of the records
    Flights flights;

    // The id for `--job`: that of its largest communicator, the oldest of them if there are several.
    [[nodiscard]] std::string id() const;
    [[nodiscard]] bool has(std::string_view id) const;  // the id, or a prefix of it, of any of its communicators
    [[nodiscard]] size_t ranks() const;                 // number of ranks of that communicator with records
    // When the last of its records was written, in microseconds since 1970.
    [[nodiscard]] double last_time() const;
};

// The jobs in `directory` and in its `round-R` subdirectories, which `tessera run` creates, newest first: several jobs
// may have written to one directory. Throws NOT_FOUND if there are no records, CORRUPT naming the file and line of an
// invalid one.
[[nodiscard]] std::vector<Job> read_jobs(const std::string& directory);

}  // namespace tsr::cli
