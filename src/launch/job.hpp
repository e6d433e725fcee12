// The options of `tessera run`, and the ranks of the next round: plain values and pure functions.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"

namespace tsr {

// One command and how many ranks run it.
struct Program {
    std::vector<std::string> command;
    int ranks = 1;
    std::vector<std::pair<std::string, std::string>> environment;
    std::string host;  // that runs it; empty: any

    [[nodiscard]] std::string name() const;  // of the executable, without directories
};

enum class OnLoss {
    restart,
    shrink,  // another round with the remaining ranks
    go_on,   // the same round: the remaining ranks continue on their own (tsr_comm_shrink)
};

struct RunOptions {
    std::vector<Program> programs;
    int min_ranks = 0;  // fewer end the job; 0: all ranks are required
    int max_restarts = 0;
    OnLoss on_loss = OnLoss::restart;
    bool prefix = true;
    bool insecure = false;
    std::string log_directory;            // empty: no files
    std::string events_file;              // empty: none
    std::string trace_directory;          // of the communicators' flight records; empty: none
    milliseconds grace{30000};            // from the first signal until the ranks are stopped
    milliseconds kill_grace{5000};        // from SIGTERM to SIGKILL
    std::optional<milliseconds> timeout;  // of the ranks' collectives

    [[nodiscard]] int ranks() const;
    // Throws INVALID_ARGUMENT for an invalid job.
    void check() const;
};

// A rank's identity across rounds; its rank is its index in the round.
struct RankIdentity {
    int program = 0;
    int instance = 0;  // of that program
    friend bool operator==(const RankIdentity&, const RankIdentity&) = default;
};

[[nodiscard]] std::vector<RankIdentity> first_round(const RunOptions& options);

struct NextRound {
    std::vector<RankIdentity> members;
    bool uses_restart = false;
};

// The round after one in which the members at the indices `lost` failed: the same ranks while restarts are left, or the
// remaining ranks while there are enough; `on_loss` decides which is tried first. nullopt: the job fails.
[[nodiscard]] std::optional<NextRound> next_round(const RunOptions& options, const std::vector<RankIdentity>& members,
                                                  const std::vector<int>& lost, int restarts_left);

// "rank 4", "ranks 1-3 and 5"
[[nodiscard]] std::string rank_spans(std::vector<int> ranks);

// Explains why next_round() returned nullopt after `restarts` restarts; empty if no further round was to be expected.
[[nodiscard]] std::string why_no_round(const RunOptions& options, const std::vector<RankIdentity>& members,
                                       const std::vector<int>& lost, int restarts);

}  // namespace tsr
