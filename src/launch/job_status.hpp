// What an agent knows about its job while it runs: plain values, and their JSON, which `tessera top` reads and agents
// send each other. docs/COMMAND.md lists the fields.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "launch/summary.hpp"

namespace tsr {

// Times are seconds since 1970 on the clock of the agent that answers; 0: never.
struct SaveFigures {
    int64_t step = 0;
    double time = 0;  // of the commit
    double duration_s = 0;
};

// What a rank has counted (base/meter.hpp).
struct RankFigures {
    int64_t steps = 0;
    int64_t step = 0;
    double step_time = 0;
    double step_s = 0;  // between the last two steps
    double exposed_s = 0;
    int64_t bytes = 0;
    int64_t saves = 0;
    int64_t failed_saves = 0;
    int64_t saved_bytes = 0;
    SaveFigures save;
};

struct RankStatus {
    int rank = 0;
    std::string host;
    std::string program;
    pid_t pid = 0;                       // 0: unknown
    std::string state = "running";       // or how it ended: "exit 0", "SIGKILL", "lost"
    std::optional<RankFigures> figures;  // none: of a host that this agent does not hear of
};

struct HostStatus {
    std::string host;
    int ranks = 0;
    bool coordinates = false;
};

struct JobStatus {
    std::string job;
    std::string run;
    std::string host;         // of the agent that answers
    pid_t launcher = 0;       // the process that the user started there
    bool coordinates = true;  // it knows all hosts; otherwise only its own
    std::string state;        // "waiting for hosts", "running", "stopping", "ended"
    double time = 0;
    double started = 0;
    int round = 0;
    int rounds = 0;  // that have begun
    int restarts = 0;
    int max_restarts = 0;
    int world_size = 0;
    std::vector<std::string> programs;
    std::vector<HostStatus> hosts;
    std::vector<RankStatus> ranks;    // in order
    std::optional<SaveFigures> save;  // the newest of the job's, of earlier rounds too
};

[[nodiscard]] std::string state_of(const RankEnd& end);

[[nodiscard]] Json to_json(const RankStatus& rank);
[[nodiscard]] Json to_json(const JobStatus& job);
// A time or a span; null: 0. Throws CORRUPT unless it stays a number when others are added to it.
[[nodiscard]] double seconds_at(const Json& json, std::string_view key);
// Throw CORRUPT.
[[nodiscard]] RankStatus rank_status_of(const Json& json);
[[nodiscard]] JobStatus job_status_of(const Json& json);

// The newest save of `ranks` and of `known`.
[[nodiscard]] std::optional<SaveFigures> newest_save(const std::vector<RankStatus>& ranks,
                                                     std::optional<SaveFigures> known);

// --- between two looks at a job

struct RankRates {
    std::optional<double> steps_a_second;
    std::optional<double> exposed;  // the share of the time, 0 to 1
    std::optional<double> bytes_a_second;
};

// In the order of now.ranks. What began anew in between has no rates.
[[nodiscard]] std::vector<RankRates> rates_between(const JobStatus& before, const JobStatus& now);

}  // namespace tsr
