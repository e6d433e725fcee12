// The ranks of one host in one round: starts them, merges their output, watches them and ends them. It decides nothing
// about the job: who is in a round and when it ends is the coordinator's business. Ends a round only when every process
// of it is dead, because ranks write into each other's memory.
//
// Single-threaded. It reaps every child of its process.
#pragma once

#include <signal.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "launch/agent_page.hpp"
#include "launch/events.hpp"
#include "launch/job.hpp"
#include "launch/job_directory.hpp"
#include "launch/log_mux.hpp"
#include "launch/meter_pages.hpp"
#include "launch/node_message.hpp"
#include "launch/process.hpp"
#include "launch/summary.hpp"
#include "store/token.hpp"

namespace tsr {

// A round as this host sees it.
struct HostRound {
    StartRound order;
    std::string store_uri;
    std::string job_id;
    std::string run_id;
};

class HostRanks {
   public:
    // Ranks start with `signal_mask`. The logs and events are the agent's.
    HostRanks(const RunOptions& options, const std::string& host, const Token& token, const sigset_t& signal_mask,
              LogMux& logs, EventLog& events);

    // Starts the ranks. Throws, with some of them started, if one cannot be.
    void start(HostRound round);
    // The ranks that have ended since the last call.
    [[nodiscard]] std::vector<RankEnd> reap();

    // Another process gets a rank that was killed. Returns how the former one ended, with what it left; nullopt if this
    // host's ranks are ending by now.
    [[nodiscard]] std::optional<RankEnd> replace(int rank);
    // A rank failed: ends the others soon, unless they are ending already.
    void hear();
    // Lets the ranks save and end, for a round that begins with other hosts.
    void change();
    // A signal asks the job to stop: the first time the ranks may save, the second time they are killed.
    void stop(int signal);
    void kill();
    void write_flights();
    void pass_deadline();
    void renew_directory();

    // A rank of another host polls for preemption.
    void hear_of_listener() { told_of_listener_ = true; }
    [[nodiscard]] bool listens() const { return page_.somebody_listens(); }

    // The ranks of the round, or of the last one.
    [[nodiscard]] std::vector<RankStatus> status() const;
    [[nodiscard]] const StartRound& order() const { return round_.order; }

    [[nodiscard]] bool in_round() const { return in_round_; }
    [[nodiscard]] int round() const { return round_.order.round; }
    [[nodiscard]] bool all_ended() const;
    [[nodiscard]] bool is_ending() const { return stage_ == Stage::ending || stage_ == Stage::killing; }
    [[nodiscard]] Deadline next_deadline() const;

    // Afterwards no process of the round is alive. Returns how the ranks ended, with what they left.
    std::vector<RankEnd> bury();

   private:
    struct Worker {
        Seat seat;
        int replacement = 0;  // how many processes had this rank before, in this round
        pid_t pid = 0;
        std::optional<RankEnd> end;      // once it has ended
        std::optional<int> ending_turn;  // the turn in which it was already exiting, before the agent stopped the ranks
        std::string error_file;
        std::string failure_file;
        std::string log_file;
    };

    enum class Stage {
        running,
        hearing,   // a rank failed; ranks that waited for it may notice and report it until the deadline
        noticing,  // asked to stop, but no rank polls for preemption: one may start to until the deadline
        saving,    // asked to stop; the ranks may save until the deadline
        ending,    // SIGTERM was sent; SIGKILL at the deadline
        killing,   // SIGKILL was sent
    };

    [[nodiscard]] std::string trace_directory() const;  // of this round
    [[nodiscard]] Worker start_worker(const Seat& seat, int replacement);
    [[nodiscard]] RankEnd with_what_it_left(const Worker& worker) const;
    [[nodiscard]] bool may_be_replaced(int wait_status) const;
    [[nodiscard]] static std::string file_stem(const Worker& worker);
    [[nodiscard]] RankOutput open_output(int local_rank, Worker& worker);
    [[nodiscard]] SharedFile open_log(const std::string& name);
    [[nodiscard]] std::vector<std::string> environment_of(const Worker& worker) const;
    void note_exit(Worker& worker, int status);
    void ask_to_save(bool listening, const std::string& who, const std::string& then);
    void note_who_is_ending();
    [[nodiscard]] int pass_on(int signal);
    void end_workers();   // SIGTERM to all living ranks
    void kill_workers();  // SIGKILL
    void signal_workers(int signal);
    [[nodiscard]] bool somebody_listens() const { return told_of_listener_ || page_.somebody_listens(); }

    const RunOptions& options_;
    const std::string host_;
    const sigset_t signal_mask_;
    const rlim_t open_files_;  // a rank's limit
    Fd token_file_;            // a memfd, 0600
    AgentPage page_;
    LogMux& logs_;
    EventLog& events_;
    std::string flight_directory_;               // of requested flight records; empty: none requested
    std::optional<JobDirectory> own_directory_;  // unless the options name one
    std::string error_directory_;
    int stop_signal_ = 0;  // the first one that asked to stop

    // Of the round.
    bool in_round_ = false;
    HostRound round_;
    std::vector<Worker> workers_;               // by local rank
    std::unique_ptr<MeterPages> meters_;        // by local rank
    DirAt round_directory_;                     // of the ranks' logs and error files
    std::vector<std::vector<int>> processors_;  // by local rank; empty: not bound
    Stage stage_ = Stage::running;
    Deadline stage_deadline_ = Deadline::in(milliseconds{0});
    Deadline grace_deadline_ = stage_deadline_;  // of the first signal
    Deadline renewal_ = stage_deadline_;         // of the job's own directory
    bool told_of_listener_ = false;
    int reap_turn_ = 0;
};

}  // namespace tsr
