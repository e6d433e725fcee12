// Decides for all hosts of a job: who is in a round, when a round begins and ends, whether another one follows, and the
// report. A state machine without input, output or clock of its own: it takes reports and the time, and gives orders.
//
//   gathering -> running -> stopping -> gathering or the next round, or the end
//
// With spares (--store-hosts) it acts only while more than half of the store hosts follow it: without them it begins no
// round, and once it has lost them it is deposed and decides nothing any more. Its rounds are those of its term (Election).
//
// A round is an epoch of the job's store: rounds only count up, and a new one begins only after every host of the
// previous one has said that all of its processes are dead, or is lost. A lost host's processes belong to an epoch that
// no store serves any more.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "launch/job.hpp"
#include "launch/node_message.hpp"

namespace tsr {

class Coordinator {
   public:
    using Node = int;  // a connection's number; never used again
    using Time = Clock::time_point;
    struct Addressed {
        Node node;
        Order order;
    };

    // What a spare knows when it takes over.
    struct Succession {
        int term = 0;
        int restarts = 0;  // used
        int hosts = 0;     // to wait for: the others of the last round
        int rounds = 0;    // that have begun
    };
    static constexpr int rounds_of_a_term = 1'000'000;
    [[nodiscard]] static int first_round(int term) { return term * rounds_of_a_term; }

    // `width`: of the report's lines; 0: not cut.
    Coordinator(RunOptions options, std::string job, size_t width, Time now);
    Coordinator(RunOptions options, std::string job, size_t width, Time now, const Succession& succession);

    void take(Node node, const Report& report, Time now);
    void lose(Node node, const std::string& why, Time now);
    // Ends the job because the coordinating agent cannot go on.
    void fail(int exit_code, const std::string& why);
    void tick(Time now);
    // When tick() must be called at the latest.
    [[nodiscard]] std::optional<Time> next_tick() const;

    [[nodiscard]] std::vector<Addressed> take_orders() { return std::exchange(orders_, {}); }

    // Hosts and ranks, without what the ranks have counted.
    void describe(JobStatus& job) const;
    // Of the job that has ended, as JSON (report.hpp).
    [[nodiscard]] const Json& report() const { return report_; }

    [[nodiscard]] bool finished() const { return state_ == State::finished; }
    [[nodiscard]] bool deposed() const { return state_ == State::deposed; }
    // Whether more than half of the store hosts follow; true without spares.
    [[nodiscard]] bool has_majority() const;
    [[nodiscard]] int round() const { return round_; }
    [[nodiscard]] int restarts() const { return restarts_; }
    // Of the round, by rank: those that have ended so far. Nothing that begins in them waits for a lost host's.
    [[nodiscard]] std::vector<RankEnd> ended() const;
    [[nodiscard]] bool all_ended() const;

   private:
    enum class State { gathering, running, stopping, finished, deposed };
    enum class Reason { none, failure, lost_node, stop, change };

    struct Member {
        Hello hello;
        int number = 0;         // in the order of joining
        bool in_round = false;  // has started it, and not said that it is over
        bool started = false;   // it takes part in the round
        bool spent = false;     // none of its ranks is left (--on-loss shrink)
        bool votes = false;     // it is the store host of its seat
    };

    void join(Node node, const Hello& hello, Time now);
    [[nodiscard]] std::string why_refused(const Hello& hello) const;
    void note_ended(Node node, RankEnd end, Time now);
    void note_details(Node node, RankEnd end);
    [[nodiscard]] bool may_replace(int rank) const;
    void replace(Node node, RankEnd end);
    void note_over(Node node, const RoundOver& over, Time now);
    void asked_to_stop(Node node, int signal);
    void stop_round(Reason reason, const EndRanks& how);
    void consider_late_nodes();
    void gather(Time now);
    void excuse_victims(std::vector<RankEnd>& failures) const;
    void conclude(Time now);
    void conclude_without_failure(Time now);
    void go_on_after_loss(const std::vector<RankEnd>& failures, const std::vector<int>& lost, Time now);
    void go_on_after_failure(const std::vector<RankEnd>& failures, const std::vector<int>& lost, Time now);
    void announce(const std::string& reason, size_t ranks, size_t former, const std::string& how,
                  const std::vector<int>& lost);
    void give_up(const std::vector<RankEnd>& failures, const std::string& why);
    void begin_round();
    [[nodiscard]] std::vector<Node> chosen_nodes() const;  // for the next round, in order of their ranks
    [[nodiscard]] std::vector<RankIdentity> seats_of(Node node) const;
    [[nodiscard]] size_t ranks_of(const std::vector<Node>& nodes) const;
    [[nodiscard]] int order_of(Node node, const RankEnd& end, Time now);
    [[nodiscard]] std::vector<RankEnd> ends_that_explain() const;
    [[nodiscard]] std::vector<RankEnd> failures_and_lost(std::vector<int>& lost) const;
    [[nodiscard]] std::string missing_hosts() const;
    // Whether the hosts that are present can form a round: MIN of them, with a rank of every program.
    [[nodiscard]] bool has_enough_hosts() const;
    // Why not, or that too few ranks are left: "2 hosts left, fewer than 3 (--nnodes)".
    [[nodiscard]] std::string why_not_enough() const;
    // "no host runs `b`"; empty if every program has ranks on one of the hosts of the next round.
    [[nodiscard]] std::string missing_program() const;

    void order(Node node, Order order) { orders_.push_back({node, std::move(order)}); }
    void order_all(const Order& order);
    void order_round(const Order& order);  // the hosts whose ranks may live
    void say(std::string text);
    void finish(int exit_code, const std::string& report, const std::string& pointer);

    const RunOptions options_;
    const HostOptions hosts_;  // one host if the options have none
    const std::string job_;
    const int term_;
    const size_t width_;

    State state_ = State::gathering;
    Reason reason_ = Reason::none;  // of stopping
    int round_ = -1;
    int restarts_ = 0;
    int joined_ = 0;
    int awaited_ = 0;  // hosts that a successor waits for before its first round; 0: as usual
    int begun_ = 0;    // rounds, also by former coordinating agents
    bool had_majority_ = false;
    std::map<int, std::string> voters_;  // of a seat: the first agent that took it, in term 0
    int stop_signal_ = 0;
    bool cut_short_ = false;
    bool failed_first_ = false;  // the round was ended for a failure, before any signal
    bool listening_ = false;
    bool told_waiting_ = false;
    Time gathering_since_;
    std::optional<Time> last_call_;  // when enough nodes have been there for long enough
    std::map<Node, Member> nodes_;
    std::vector<RankIdentity> members_;  // of the round, by rank
    std::vector<std::optional<RankEnd>> ends_;
    std::map<int, RankEnd> replaced_;  // by rank: how the last process ended that another one has replaced
    // The order in which ranks ended: an agent's turns, in the order in which they were heard of.
    std::map<std::pair<Node, int>, int> turns_;
    std::map<int, Time> first_heard_;  // of a turn of turns_
    std::vector<Addressed> orders_;
    Json report_;
};

}  // namespace tsr
