// The launcher's agent: serves the job's store, starts the ranks, merges their output, and watches them. When a rank
// fails, it stops the others and, if allowed, starts a new round (an epoch of the store) with the same or the remaining
// ranks, but only after every process of the previous round is dead, because ranks write into each other's memory.
//
// Single-threaded. It runs in the process that run_guarded() creates, and reaps every child of that process.
#pragma once

#include <signal.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "launch/agent_page.hpp"
#include "launch/events.hpp"
#include "launch/job.hpp"
#include "launch/job_directory.hpp"
#include "launch/log_mux.hpp"
#include "launch/port.hpp"
#include "launch/process.hpp"
#include "launch/summary.hpp"
#include "store/server.hpp"
#include "store/token.hpp"

namespace tsr {

class Agent {
   public:
    // `guardian` becomes readable when the guardian has died; ranks start with `signal_mask`.
    Agent(RunOptions options, int guardian, const sigset_t& signal_mask);

    // Runs the job to completion. Returns the exit code for the shell; 1 instead of 0 if some output of the job was
    // lost.
    [[nodiscard]] int run();

   private:
    struct Worker {
        RankIdentity member;
        pid_t pid = 0;
        std::optional<RankEnd> end;      // once it has ended
        std::optional<int> ending_turn;  // the turn in which it was already exiting, before the agent stopped the ranks
        std::string error_file;
        std::string failure_file;
        std::string log_file;
    };

    // The result of a round.
    struct Outcome {
        std::vector<RankEnd> ends;      // by rank
        std::vector<RankEnd> failures;  // the failed ones, root cause first
        std::vector<int> lost;          // the root cause, and other ranks that were killed from outside
    };

    enum class Stage {
        running,
        hearing,   // a rank failed; ranks that waited for it may notice and report it until the deadline
        noticing,  // asked to stop, but no rank polls for preemption: one may start to until the deadline
        saving,    // asked to stop; the ranks may save until the deadline
        ending,    // SIGTERM was sent; SIGKILL at the deadline
        killing,   // SIGKILL was sent
    };

    [[nodiscard]] bool open_events();
    [[nodiscard]] int run_rounds();
    [[nodiscard]] Outcome run_round(const std::vector<RankIdentity>& members);
    [[nodiscard]] StoreOptions store_options() const;
    void start_workers(const std::vector<RankIdentity>& members);
    [[nodiscard]] std::string trace_directory() const;  // of this round
    void start_worker(int rank, const std::vector<RankIdentity>& members);
    [[nodiscard]] RankOutput open_output(int rank, int local_rank, Worker& worker);
    [[nodiscard]] SharedFile open_log(const std::string& name);
    [[nodiscard]] int pass_on(int signal);
    [[nodiscard]] std::vector<std::string> environment_of(int rank, const std::vector<RankIdentity>& members,
                                                          const Worker& worker) const;
    void turn();
    void take_signals();
    void reap();
    void note_exit(int rank, int status);
    [[nodiscard]] int living() const;
    [[nodiscard]] bool survives_loss_of(const Worker& worker) const;
    void tell_ranks_of_departures();
    void asked_to_stop(int signal);
    void ask_for_flights();
    [[nodiscard]] bool is_ending() const { return stage_ == Stage::ending || stage_ == Stage::killing; }
    void note_who_is_ending();
    void end_workers();   // SIGTERM to all living ranks
    void kill_workers();  // SIGKILL
    void signal_workers(int signal);
    void bury_round();  // afterwards no process of the round is alive
    [[nodiscard]] bool all_ended() const;
    [[nodiscard]] int timeout_ms() const;
    void renew_directory();
    void pass_deadline();
    [[nodiscard]] Outcome outcome() const;

    const RunOptions options_;
    const int guardian_;
    const sigset_t signal_mask_;
    const rlim_t open_files_;  // a rank's limit
    const std::string host_;
    const Token token_;
    const std::string job_id_;
    Fd token_file_;  // a memfd, 0600
    Fd signals_;
    AgentPage page_;
    EventLog events_;
    LogMux logs_;
    std::string flight_directory_;               // of requested flight records; empty: none requested
    std::optional<JobDirectory> own_directory_;  // unless the options name one
    std::string error_directory_;

    int round_ = 0;
    int restarts_ = 0;
    int stop_signal_ = 0;  // the first one that asked to stop
    bool guardian_died_ = false;

    // Of the round.
    std::shared_ptr<StoreServer> store_;
    std::shared_ptr<Store> own_client_;  // of that server, once needed
    std::unique_ptr<PortReservation> master_port_;
    std::vector<Worker> workers_;
    DirAt round_directory_;                     // of the ranks' logs and error files
    std::vector<std::vector<int>> processors_;  // by local rank; empty: not bound
    Stage stage_ = Stage::running;
    Deadline stage_deadline_ = Deadline::in(milliseconds{0});
    Deadline grace_deadline_ = stage_deadline_;  // of the first signal
    Deadline renewal_ = stage_deadline_;         // of the job's own directory
    bool failed_ = false;                        // a rank failed on its own
    int reap_turn_ = 0;
};

}  // namespace tsr
