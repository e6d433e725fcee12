// The options of `tessera run`, and the ranks of the next round: plain values and pure functions.
#pragma once

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "launch/binding.hpp"
#include "launch/rank_output.hpp"

namespace tsr {

[[nodiscard]] inline double seconds(milliseconds span) { return std::chrono::duration<double>(span).count(); }

// One command and how many ranks run it.
struct Program {
    std::vector<std::string> command;
    int ranks = 1;  // on this host; 0: only other hosts of the job run it
    std::vector<std::pair<std::string, std::string>> environment;
    std::string title;                // of what an interpreter runs; empty: the executable
    std::string role = "default";     // torchrun's: ROLE_RANK and ROLE_WORLD_SIZE count the ranks with the same role
    size_t own_arguments = 1;         // the index in `command` of the first argument that is the program's own
    std::string local_rank_argument;  // "--local-rank": ranks get --local-rank=N as first own argument; empty: none
    std::string host;                 // that runs it; empty: any

    [[nodiscard]] std::string name() const;  // without directories
    [[nodiscard]] std::vector<std::string> command_of(int local_rank) const;
    // The command without the interpreter that this host found for it, and its host: the same on all hosts of a job.
    [[nodiscard]] std::string text_for_all_hosts() const;
};

enum class OnLoss {
    restart,
    shrink,   // another round with the remaining ranks
    go_on,    // the same round: the remaining ranks continue on their own (tsr_comm_shrink)
    replace,  // the same round: another process gets the rank, and the remaining ones continue (tsr_comm_grow)
};

inline constexpr int max_ranks = 4096;  // of a job

// A job of several hosts: one agent on each, all started with the same command.
struct HostOptions {
    int min_nodes = 1;
    int max_nodes = 1;
    std::string endpoint_host;  // where the agents meet
    uint16_t endpoint_port = 29400;
    std::vector<std::pair<std::string, uint16_t>> spares;  // --store-hosts, in order: HOST, PORT
    std::string version;                                   // of Tessera
    std::string run_id = "none";                           // distinguishes jobs at one endpoint
    int node_rank = -1;                                    // -1: in the order in which hosts join
    std::optional<bool> is_host;        // whether this agent owns the endpoint; nullopt: if it can listen there
    milliseconds join_timeout{600000};  // until enough hosts have joined
    milliseconds last_call{30000};      // for more, once there are enough
    milliseconds silence{6000};         // after which an agent counts as lost

    // Of the store hosts: the endpoint and the spares.
    [[nodiscard]] int seats() const { return 1 + static_cast<int>(spares.size()); }
};

struct RunOptions {
    std::vector<Program> programs;
    std::optional<HostOptions> hosts;  // nullopt: this host alone
    int min_ranks = 0;                 // fewer end the job; 0: all ranks are required
    int max_restarts = 0;
    OnLoss on_loss = OnLoss::restart;
    bool insecure = false;
    OutputOptions output;
    std::string log_directory;            // empty: no files
    std::string events_file;              // empty: none
    std::string trace_directory;          // of the communicators' flight records; empty: none
    std::string report_file;              // empty: none
    std::string metrics_host;             // where this agent answers Prometheus; empty: nowhere
    uint16_t metrics_port = 0;            // 0: a free one
    milliseconds grace{30000};            // from the first signal until the ranks are stopped
    milliseconds kill_grace{5000};        // from SIGTERM to SIGKILL
    std::optional<milliseconds> timeout;  // of the ranks' collectives
    std::vector<int> stop_signals{SIGTERM, SIGINT, SIGHUP, SIGQUIT};  // ask the job to save and end
    int preempted_exit_code = 0;      // of a job that was asked to end, and whose ranks all exited with 0
    bool virtual_local_rank = false;  // LOCAL_RANK=0 and one visible device for each rank
    Bind bind = Bind::none;
    std::vector<int> shared_processors;  // that the ranks of this host share equally; empty: `bind` says

    [[nodiscard]] int ranks() const;
    // Throws INVALID_ARGUMENT for an invalid job.
    void check() const;
};

// A rank's identity across rounds; its rank is its index in the round.
struct RankIdentity {
    int program = 0;
    int instance = 0;  // of that program
    int node = 0;      // the host that runs it, as the coordinator numbers them
    friend bool operator==(const RankIdentity&, const RankIdentity&) = default;
};

// All ranks of a host that runs so many of each program.
[[nodiscard]] std::vector<RankIdentity> ranks_of_host(const std::vector<int>& ranks, int node);

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
