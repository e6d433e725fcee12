// The launcher's agent, one on each host: a poll loop around the ranks of this host (HostRanks), the job's decisions
// (Coordinator, in the agent that owns the endpoint) and the connections between the agents (NodeLink). What happens here
// becomes a report to the coordinator, in this process or in another; what the coordinator orders is done here.
//
// With spares (--store-hosts), the agents that have lost the coordinating one search for another among the store hosts
// (Contacts), which elect one of themselves (Election). It knows the term and the restarts of the last round; what else the
// previous one knew is lost.
//
// The coordinating agent also serves the ranks' store, a new one for each round, and writes into it which ranks ended.
//
// Single-threaded. It runs in the process that run_guarded() creates.
#pragma once

#include <signal.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "launch/contacts.hpp"
#include "launch/coordinator.hpp"
#include "launch/election.hpp"
#include "launch/events.hpp"
#include "launch/host_ranks.hpp"
#include "launch/job.hpp"
#include "launch/log_mux.hpp"
#include "launch/node_link.hpp"
#include "launch/port.hpp"
#include "launch/status_server.hpp"
#include "store/address.hpp"
#include "store/handshake.hpp"
#include "store/server.hpp"
#include "store/token.hpp"

namespace tsr {

class JobAgent {
   public:
    // `guardian` becomes readable when the guardian has died; ranks start with `signal_mask`.
    JobAgent(RunOptions options, int guardian, const sigset_t& signal_mask);

    // Runs the job to completion. Returns the exit code for the shell; 1 instead of 0 if some output of the job was
    // lost.
    [[nodiscard]] int run();

   private:
    struct Peer {  // an agent that the coordinating one is connected to
        explicit Peer(Channel channel) : link(std::move(channel)) {}
        NodeLink link;
        std::optional<double> clock_ahead;  // of its clock, in seconds
        std::optional<Hello> hello;         // with spares: for when this agent coordinates
        Figures figures;                    // the last that it sent
    };

    [[nodiscard]] bool open_events();
    [[nodiscard]] int run_job();
    void end_ranks();
    void open_report();
    void keep_newest_save();
    [[nodiscard]] Hello hello(int socket = -1);
    void coordinate(const std::string& bind_host);
    [[nodiscard]] std::optional<std::string> listen_at_endpoint();
    [[nodiscard]] std::optional<std::string> listen_at(const Address& place, const char* option,
                                                       std::optional<Error>& last);
    void join();
    void join_once(Deadline deadline);
    void rejoin_or_end();

    [[nodiscard]] Address store_host(int seat) const;
    void begin_with_spares();
    void search();
    void tend_contacts();
    [[nodiscard]] std::optional<Stand> question() const;
    void ask();
    void hear_of_search(int seat, const Order& order);
    void lead();
    void stand_down();

    void turn();
    void take_signals();
    void end_round_if_over();
    void tend_peers();
    void tend_coordinator();
    void beat();
    [[nodiscard]] int timeout_ms() const;

    void report(Report report);
    void pump();  // lets the coordinator take reports, and its orders be done, until there are none
    void obey(Order order);
    void start_round(StartRound order);
    void serve_store(StartRound& order);
    void tell_ranks_of_departures();
    void hear(Coordinator::Node node, Peer& peer, Report report);
    void fail(const Error& error);

    // What others may ask of this agent while the job runs.
    [[nodiscard]] JobStatus status() const;
    void answer_questions();
    void open_metrics();
    [[nodiscard]] std::string write_report() const;  // why it could not be; empty: it is written, or not asked for

    [[nodiscard]] StoreOptions store_options() const;
    [[nodiscard]] std::string endpoint() const;

    const RunOptions options_;
    const int guardian_;
    const std::string host_;
    const std::string agent_id_;
    Token token_;
    handshake::Party party_;  // of the agents' connections; several hosts only
    Fd signals_;
    EventLog events_;
    LogMux logs_;
    HostRanks ranks_;
    std::unique_ptr<PortReservation> master_port_;
    StatusServer questions_;
    const double started_ = wall_time();
    std::optional<SaveFigures> save_;  // the newest of former rounds

    std::string job_id_;
    std::string run_id_;
    int signal_while_idle_ = 0;  // asked to stop while this host had no ranks
    bool guardian_died_ = false;
    std::optional<int> exit_code_;  // the job has ended
    bool told_of_listener_ = false;
    Clock::time_point last_beat_ = Clock::now();

    // Of the coordinating agent.
    std::unique_ptr<Coordinator> coordinator_;
    Fd report_file_;
    std::deque<std::pair<Coordinator::Node, Report>> reports_;
    std::string bind_host_ = "127.0.0.1";
    std::optional<NodeListener> listener_;
    std::map<Coordinator::Node, Peer> peers_;
    Coordinator::Node next_node_ = 1;
    std::shared_ptr<StoreServer> store_;
    std::shared_ptr<Store> own_client_;  // of that server, once needed
    int store_round_ = -1;
    bool departures_changed_ = false;
    int refusals_told_ = 0;

    // Of the others.
    std::optional<NodeLink> coordinator_link_;
    std::string coordinator_address_;
    std::string coordinator_host_;
    std::string lost_link_;  // why there is none any more; empty: there is one
    bool welcome_ = false;
    bool takes_part_ = false;  // it has been in a round

    // With spares (--store-hosts).
    int seat_ = -1;                     // this agent's place among the store hosts
    std::optional<Election> election_;  // if it votes
    std::optional<Contacts> contacts_;  // while it searches for the coordinating agent
    Deadline search_deadline_ = Deadline::in(milliseconds{0});
    int term_ = 0;  // of the coordinating agent
    std::string coordinator_uri_;
    Clock::time_point led_since_;
    int group_size_ = 0;  // of the last round; 0: there was none
    int restarts_ = 0;    // used
    int rounds_begun_ = 0;
    int stop_asked_ = 0;  // the signal that this agent has passed on
    int stop_heard_ = 0;  // the signal that asks the job to stop
};

}  // namespace tsr
