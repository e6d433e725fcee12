#include "launch/coordinator.hpp"

#include <fmt/core.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>
#include <variant>

#include "base/error.hpp"
#include "launch/election.hpp"
#include "launch/process.hpp"
#include "launch/report.hpp"

namespace tsr {

namespace {

// What two hosts report within this time counts as noticed together: the network may deliver the later one first.
constexpr milliseconds together{50};
constexpr milliseconds patience{200};  // until a message says for which hosts the job waits

std::string plural(size_t count, const char* noun) {
    return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

}  // namespace

Coordinator::Coordinator(RunOptions options, std::string job, size_t width, Time now)
    : Coordinator(std::move(options), std::move(job), width, now, Succession{}) {}

Coordinator::Coordinator(RunOptions options, std::string job, size_t width, Time now, const Succession& succession)
    : options_(std::move(options)),
      hosts_(options_.hosts.value_or(HostOptions{})),
      job_(std::move(job)),
      term_(succession.term),
      width_(width),
      round_(first_round(succession.term) - 1),
      restarts_(succession.restarts),
      awaited_(succession.hosts),
      begun_(succession.rounds),
      gathering_since_(now) {}

bool Coordinator::has_majority() const {
    if (hosts_.spares.empty()) return true;
    const auto voters = std::ranges::count_if(nodes_, [](const auto& entry) { return entry.second.votes; });
    return voters >= Election::majority_of(hosts_.seats());
}

void Coordinator::order_all(const Order& order) {
    for (const auto& [node, member] : nodes_) this->order(node, order);
}

void Coordinator::order_round(const Order& order) {
    for (const auto& [node, member] : nodes_) {
        if (member.in_round) this->order(node, order);
    }
}

void Coordinator::say(std::string text) { order_all(Say{std::move(text), "", {}}); }

// --- reports

void Coordinator::take(Node node, const Report& report, Time now) {
    if (state_ == State::finished || state_ == State::deposed) return;
    if (const auto* hello = std::get_if<Hello>(&report)) return join(node, *hello, now);
    if (!nodes_.contains(node)) return;
    if (const auto* ended = std::get_if<RankEnded>(&report)) {
        if (ended->round == round_) note_ended(node, ended->end, now);
    } else if (const auto* details = std::get_if<RankDetails>(&report)) {
        if (details->round == round_) note_details(node, details->end);
    } else if (const auto* over = std::get_if<RoundOver>(&report)) {
        if (over->round == round_) note_over(node, *over, now);
    } else if (const auto* stop = std::get_if<StopAsked>(&report)) {
        asked_to_stop(node, stop->signal);
    } else if (std::holds_alternative<FlightsAsked>(report)) {
        order_round(WriteFlights{});
    } else if (std::holds_alternative<Listening>(report)) {
        if (!std::exchange(listening_, true)) order_round(Listening{});
    } else if (const auto* failed = std::get_if<NodeFailed>(&report)) {
        const std::string text = fmt::format("host {} failed: {}", nodes_.at(node).hello.host, failed->message);
        nodes_.erase(node);  // it knows
        finish(failed->exit_code, text, text);
    }
}

void Coordinator::join(Node node, const Hello& hello, Time now) {
    if (nodes_.contains(node)) return;
    // An agent that comes back is here before the end of its old connection is noticed.
    for (const auto& [other, member] : nodes_) {
        if (member.hello.agent != hello.agent) continue;
        lose(other, "its agent has connected again", now);
        break;
    }
    if (state_ == State::deposed) return;
    if (state_ == State::finished) return order(node, Refused{"the job has ended"});
    // It can never follow this term again, and would come back for ever.
    if (!hosts_.spares.empty() && hello.ballot == job_ && hello.term > term_) {
        state_ = State::deposed;
        return;
    }
    if (const std::string why = why_refused(hello); !why.empty()) {
        order(node, Refused{why});
        // Before the job has begun, whoever starts it is there to see it; later, a stray host must not end it.
        if (round_ < 0 && !nodes_.empty()) return finish(1, why, why);
        return say(fmt::format("refused host {}: {}", hello.host, why));
    }
    // Later terms know a voter by its own word: only that of the first one makes one.
    const bool votes =
        hello.seat >= 0 &&
        (term_ == 0 ? voters_.try_emplace(hello.seat, hello.agent).first->second == hello.agent : hello.ballot == job_);
    nodes_[node] = Member{.hello = hello, .number = joined_++, .votes = votes};
    had_majority_ = had_majority_ || has_majority();
    order(node, Welcome{job_, hosts_.run_id, nodes_.begin()->second.hello.host, term_, votes});
    if (nodes_.size() > 1 && hello.architecture != nodes_.begin()->second.hello.architecture) {
        say(fmt::format("host {} is {}, but host {} is {}", hello.host, hello.architecture,
                        nodes_.begin()->second.hello.host, nodes_.begin()->second.hello.architecture));
    }
    if (state_ == State::running) consider_late_nodes();
    tick(now);
}

std::string Coordinator::why_refused(const Hello& hello) const {
    if (hello.node_rank >= hosts_.max_nodes) {
        return fmt::format("--node-rank {} is not below the number of hosts, {} (--nnodes)", hello.node_rank,
                           hosts_.max_nodes);
    }
    size_t ranks = 0;
    for (const int count : hello.ranks) ranks += static_cast<size_t>(count);
    if (ranks == 0) return fmt::format("host {} would have no rank; each host needs one of some program", hello.host);
    for (const auto& [node, member] : nodes_) {
        const Hello& other = member.hello;
        if (other.version != hello.version) {
            return fmt::format("host {} has Tessera {}, but host {} has {}", hello.host, hello.version, other.host,
                               other.version);
        }
        for (size_t i = 0; i < std::max(other.agreed.size(), hello.agreed.size()); ++i) {
            const std::string there = i < hello.agreed.size() ? hello.agreed[i] : "nothing";
            const std::string here = i < other.agreed.size() ? other.agreed[i] : "nothing";
            if (here == there) continue;
            return fmt::format("host {} has {}, but host {} has {}; start the same command on all hosts", hello.host,
                               there, other.host, here);
        }
        if ((other.node_rank < 0) != (hello.node_rank < 0)) {
            const bool here = hello.node_rank >= 0;
            return fmt::format("host {} has --node-rank {}, but host {} has none; give every host one, or none",
                               here ? hello.host : other.host, std::max(hello.node_rank, other.node_rank),
                               here ? other.host : hello.host);
        }
        if (hello.node_rank >= 0 && other.node_rank == hello.node_rank) {
            return fmt::format("--node-rank {} is given on two hosts: {} and {}", hello.node_rank, other.host,
                               hello.host);
        }
        for (const int count : other.ranks) ranks += static_cast<size_t>(count);
    }
    if (hello.ranks.size() != options_.programs.size()) {
        return fmt::format("host {} has {}, but the job has {}", hello.host, plural(hello.ranks.size(), "program"),
                           plural(options_.programs.size(), "program"));
    }
    if (ranks > static_cast<size_t>(max_ranks)) {
        return fmt::format("the job would have {} ranks; at most {} are allowed", ranks, max_ranks);
    }
    return "";
}

int Coordinator::order_of(Node node, const RankEnd& end, Time now) {
    const auto key = std::pair(node, end.order);
    if (const auto known = turns_.find(key); known != turns_.end()) return known->second;
    int order = static_cast<int>(first_heard_.size());
    if (order > 0 && now - first_heard_.at(order - 1) <= together) {
        const bool has_own = std::ranges::any_of(
            turns_, [&](const auto& turn) { return turn.first.first == node && turn.second == order - 1; });
        if (!has_own) --order;
    }
    first_heard_.try_emplace(order, now);
    turns_[key] = order;
    return order;
}

void Coordinator::note_ended(Node node, RankEnd end, Time now) {
    const auto rank = static_cast<size_t>(end.rank);
    if (rank >= members_.size() || members_[rank].node != node || ends_[rank]) return;
    end.order = order_of(node, end, now);
    ends_[rank] = end;
    const bool killed = state_ == State::running && !end.by_agent && stop_signal_ == 0 && WIFSIGNALED(end.wait_status);
    if (killed && may_replace(end.rank)) return replace(node, std::move(end));
    const auto living =
        static_cast<size_t>(std::ranges::count_if(ends_, [](const auto& known) { return !known.has_value(); }));
    // A killed rank is a loss that the others may survive; a rank that fails on its own is an error of the program.
    if (killed && options_.on_loss == OnLoss::go_on && static_cast<int>(living) >= options_.min_ranks) {
        ends_[rank]->survived = true;
        return say(fmt::format("rank {} {}; {} may continue (--on-loss continue)", end.rank,
                               describe_status(end.wait_status), plural(living, "rank")));
    }
    if (end.wait_status != 0 && !end.by_agent && state_ == State::running) {
        stop_round(Reason::failure, {EndRanks::Manner::failure, 0});
    }
}

// If other ranks have ended, they do not wait for another process: either the job is about to end, or they fail, too.
bool Coordinator::may_replace(int rank) const {
    if (options_.on_loss != OnLoss::replace || restarts_ >= options_.max_restarts || members_.size() == 1) return false;
    for (size_t other = 0; other < ends_.size(); ++other) {
        if (static_cast<int>(other) != rank && ends_[other]) return false;
    }
    return true;
}

void Coordinator::replace(Node node, RankEnd end) {
    ++restarts_;
    end.survived = true;
    ends_[static_cast<size_t>(end.rank)].reset();
    const std::string reason = fmt::format("rank {} {}", end.rank, describe_status(end.wait_status));
    order_all(Say{fmt::format("{}; another process takes its place, restart {} of {} (--on-loss replace)", reason,
                              restarts_, options_.max_restarts),
                  "replace",
                  {{"round", round_}, {"rank", end.rank}, {"reason", reason}}});
    order(node, ReplaceRank{round_, end.rank});
    replaced_[end.rank] = std::move(end);
}

void Coordinator::note_details(Node node, RankEnd end) {
    const auto rank = static_cast<size_t>(end.rank);
    if (rank >= members_.size() || members_[rank].node != node) return;
    if (const auto former = replaced_.find(end.rank); former != replaced_.end() && former->second.pid == end.pid) {
        end.order = former->second.order;
        end.survived = true;
        former->second = std::move(end);
        return;
    }
    if (!ends_[rank]) return;
    end.order = ends_[rank]->order;
    end.survived = ends_[rank]->survived;
    ends_[rank] = std::move(end);
}

void Coordinator::note_over(Node node, const RoundOver& over, Time now) {
    Member& member = nodes_.at(node);
    if (!member.in_round) return;
    member.in_round = false;
    member.hello.master_port = over.master_port;
    cut_short_ = cut_short_ || over.cut_short;
    // Its ranks have all ended, whatever it said about them.
    for (size_t rank = 0; rank < members_.size(); ++rank) {
        if (members_[rank].node == node && !ends_[rank]) {
            ends_[rank].emplace();
            ends_[rank]->rank = static_cast<int>(rank);
            ends_[rank]->host = member.hello.host;
            ends_[rank]->by_agent = true;
        }
    }
    const bool all = std::ranges::none_of(nodes_, [](const auto& entry) { return entry.second.in_round; });
    if (all) conclude(now);
}

void Coordinator::lose(Node node, const std::string& why, Time now) {
    const auto found = nodes_.find(node);
    if (found == nodes_.end() || state_ == State::finished || state_ == State::deposed) return;
    const Member member = found->second;
    nodes_.erase(found);
    if (had_majority_ && !has_majority()) {
        state_ = State::deposed;
        return;
    }
    if (!member.in_round) {
        if (hosts_.max_nodes > 1) say(fmt::format("host {} has left: {}", member.hello.host, why));
        return tick(now);
    }
    const int order = static_cast<int>(first_heard_.size());
    first_heard_.try_emplace(order, now);
    bool any = false;
    for (size_t rank = 0; rank < members_.size(); ++rank) {
        if (members_[rank].node != node || ends_[rank]) continue;
        any = true;
        RankEnd& end = ends_[rank].emplace();
        end.rank = static_cast<int>(rank);
        end.host = member.hello.host;
        end.wait_status = 1 << 8;  // exit code 1
        end.time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
        end.order = order;
        end.gone = why;
    }
    if (state_ == State::running && any) stop_round(Reason::lost_node, {EndRanks::Manner::failure, 0});
    const bool all = std::ranges::none_of(nodes_, [](const auto& entry) { return entry.second.in_round; });
    if (all) conclude(now);
}

void Coordinator::asked_to_stop(Node node, int signal) {
    if (stop_signal_ == 0) stop_signal_ = signal;
    if (state_ == State::gathering) {
        const std::string text =
            fmt::format("{} on host {} ended the job", signal_name(signal), nodes_.at(node).hello.host);
        return finish(128 + signal, text, text);
    }
    if (nodes_.size() > 1) {
        say(fmt::format("{} on host {} asks the job to stop", signal_name(signal), nodes_.at(node).hello.host));
    }
    order_round(EndRanks{EndRanks::Manner::stop, signal});
}

void Coordinator::stop_round(Reason reason, const EndRanks& how) {
    state_ = State::stopping;
    reason_ = reason;
    failed_first_ = stop_signal_ == 0 && reason != Reason::change;
    order_round(how);
}

// --- rounds

// A host that joins while there is room begins a new round, unless ranks have already ended: they are about to be done.
void Coordinator::consider_late_nodes() {
    if (stop_signal_ != 0) return;
    const auto started = std::ranges::count_if(nodes_, [](const auto& entry) { return entry.second.started; });
    const bool waits =
        std::ranges::any_of(nodes_, [](const auto& entry) { return !entry.second.started && !entry.second.spent; });
    if (!waits || started >= hosts_.max_nodes) return;
    if (std::ranges::any_of(ends_, [](const auto& end) { return end.has_value(); })) return;
    say("a host has joined; the ranks may save, and a new round begins with it");
    stop_round(Reason::change, {EndRanks::Manner::change, 0});
}

void Coordinator::gather(Time now) {
    state_ = State::gathering;
    // Of hosts that have no rank left, the job begins anew.
    if (std::ranges::all_of(nodes_, [](const auto& entry) { return entry.second.spent; })) {
        for (auto& [node, member] : nodes_) member.spent = member.started = false;
    }
    gathering_since_ = now;
    last_call_.reset();
    told_waiting_ = false;
    tick(now);
}

std::string Coordinator::missing_hosts() const {
    std::set<int> ranks;
    std::string hosts;
    for (const auto& [node, member] : nodes_) {
        ranks.insert(member.hello.node_rank);
        hosts += fmt::format("{}{}", hosts.empty() ? "" : ", ", member.hello.host);
        if (member.hello.node_rank >= 0) hosts += fmt::format(" (node rank {})", member.hello.node_rank);
    }
    std::string text =
        fmt::format("{} of {}{} hosts have joined: {}", nodes_.size(), hosts_.min_nodes,
                    hosts_.max_nodes > hosts_.min_nodes ? fmt::format(" to {}", hosts_.max_nodes) : "", hosts);
    if (!ranks.empty() && *ranks.begin() >= 0 && hosts_.min_nodes == hosts_.max_nodes) {
        std::string missing;
        for (int rank = 0; rank < hosts_.max_nodes; ++rank) {
            if (!ranks.contains(rank)) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
        }
        if (!missing.empty()) text += fmt::format("; missing: node rank {}", missing);
    }
    if (!has_majority())
        text += fmt::format("; more than half of the {} store hosts are needed (--store-hosts)", hosts_.seats());
    if (const std::string program = missing_program(); !program.empty()) text += "; " + program;
    return text;
}

std::string Coordinator::missing_program() const {
    const std::vector<Node> nodes = chosen_nodes();
    for (size_t program = 0; program < options_.programs.size(); ++program) {
        // A job that shrinks may lose a program.
        const bool runs = std::ranges::any_of(nodes_, [&](const auto& entry) {
            const auto& [node, member] = entry;
            const bool counts = member.spent || std::ranges::find(nodes, node) != nodes.end();
            return counts && member.hello.ranks.at(program) > 0;
        });
        if (!runs) return fmt::format("no host runs {}", options_.programs[program].text_for_all_hosts());
    }
    return "";
}

bool Coordinator::has_enough_hosts() const {
    return static_cast<int>(nodes_.size()) >= hosts_.min_nodes && missing_program().empty();
}

std::string Coordinator::why_not_enough() const {
    const std::string left = fmt::format("{} left", plural(nodes_.size(), "host"));
    if (static_cast<int>(nodes_.size()) < hosts_.min_nodes) {
        return fmt::format("{}, fewer than {} (--nnodes)", left, hosts_.min_nodes);
    }
    if (const std::string program = missing_program(); !program.empty()) return fmt::format("{}; {}", left, program);
    return fmt::format("{} left{}", plural(ranks_of(chosen_nodes()), "rank"),
                       options_.min_ranks > 0 ? fmt::format(", fewer than --min-ranks {}", options_.min_ranks) : "");
}

std::optional<Coordinator::Time> Coordinator::next_tick() const {
    if (state_ != State::gathering) return std::nullopt;
    Time next = gathering_since_ + hosts_.join_timeout;
    if (last_call_) next = std::min(next, *last_call_);
    if (!told_waiting_) next = std::min(next, gathering_since_ + patience);
    return next;
}

void Coordinator::tick(Time now) {
    if (state_ != State::gathering) return;
    const int present = static_cast<int>(nodes_.size());
    const bool full = present >= hosts_.max_nodes;
    const bool enough = has_enough_hosts() && has_majority();
    if (enough && present >= (awaited_ > 0 ? std::min(awaited_, hosts_.max_nodes) : hosts_.max_nodes))
        return begin_round();
    if (const std::string program = missing_program(); full && round_ < 0 && !program.empty()) {  // nobody can be added
        const std::string text = fmt::format("the job cannot start: all hosts have joined, but {}", program);
        return finish(1, text, text);
    }
    if (!enough) last_call_.reset();
    if (enough && !last_call_) last_call_ = now + hosts_.last_call;
    if (last_call_ && now >= *last_call_) return begin_round();
    if (!told_waiting_ && now >= gathering_since_ + patience) {
        told_waiting_ = true;
        say(fmt::format("waiting for more hosts: {}", missing_hosts()));
    }
    if (now < gathering_since_ + hosts_.join_timeout) return;
    if (enough) return begin_round();
    const std::string text =
        fmt::format("the job cannot start: after {:g} s, {}", seconds(hosts_.join_timeout), missing_hosts());
    finish(1, text, text);
}

// The hosts of the previous round first, then those that have waited longest; among them, the order of --node-rank, or
// of joining.
std::vector<Coordinator::Node> Coordinator::chosen_nodes() const {
    std::vector<Node> nodes;
    for (const auto& [node, member] : nodes_) {
        if (!member.spent) nodes.push_back(node);
    }
    std::ranges::sort(nodes, {}, [&](Node node) {
        const Member& member = nodes_.at(node);
        return std::pair(!member.started, member.number);
    });
    if (static_cast<int>(nodes.size()) > hosts_.max_nodes) nodes.resize(static_cast<size_t>(hosts_.max_nodes));
    std::ranges::sort(nodes, {}, [&](Node node) {
        const Member& member = nodes_.at(node);
        return std::pair(member.hello.node_rank, member.number);
    });
    return nodes;
}

// The ranks that it had and keeps, or all of them.
std::vector<RankIdentity> Coordinator::seats_of(Node node) const {
    const Member& member = nodes_.at(node);
    if (!member.started) return ranks_of_host(member.hello.ranks, node);
    std::vector<RankIdentity> seats;
    std::ranges::copy_if(members_, std::back_inserter(seats),
                         [&](const RankIdentity& identity) { return identity.node == node; });
    return seats;
}

size_t Coordinator::ranks_of(const std::vector<Node>& nodes) const {
    size_t ranks = 0;
    for (const Node node : nodes) ranks += seats_of(node).size();
    return ranks;
}

void Coordinator::begin_round() {
    const std::vector<Node> chosen = chosen_nodes();
    std::vector<RankIdentity> members;
    for (const Node node : chosen) {
        for (const RankIdentity& identity : seats_of(node)) members.push_back(identity);
    }
    members_ = std::move(members);
    ends_.assign(members_.size(), std::nullopt);
    replaced_.clear();
    turns_.clear();
    first_heard_.clear();
    ++round_;
    state_ = State::running;
    reason_ = Reason::none;
    cut_short_ = false;
    failed_first_ = false;
    ++begun_;
    listening_ = false;
    last_call_.reset();
    awaited_ = 0;
    for (auto& [node, member] : nodes_) {
        member.started = std::ranges::find(chosen, node) != chosen.end();
        member.in_round = member.started;
    }
    StartRound start;
    start.round = round_;
    start.restarts = restarts_;
    start.world_size = static_cast<int>(members_.size());
    start.group_size = static_cast<int>(chosen.size());
    const Hello& first = nodes_.at(chosen.front()).hello;
    start.master_address = first.address;
    start.master_port = first.master_port;
    const auto role_of = [&](const RankIdentity& member) -> const std::string& {
        return options_.programs.at(static_cast<size_t>(member.program)).role;
    };
    std::map<std::string, int> sizes;
    for (const RankIdentity& member : members_) ++sizes[role_of(member)];
    std::map<std::string, int> seated;
    int rank = 0;
    for (const Node node : chosen) {
        start.seats.clear();
        for (; rank < start.world_size && members_[static_cast<size_t>(rank)].node == node; ++rank) {
            const RankIdentity& identity = members_[static_cast<size_t>(rank)];
            const std::string& role = role_of(identity);
            start.seats.push_back({rank, identity.program, identity.instance, seated[role]++, sizes[role]});
        }
        order(node, start);
        ++start.group_rank;
    }
}

void Coordinator::describe(JobStatus& job) const {
    switch (state_) {
        case State::gathering: job.state = "waiting for hosts"; break;
        case State::running: job.state = "running"; break;
        case State::stopping: job.state = "stopping"; break;
        case State::finished: job.state = "ended"; break;
        case State::deposed: job.state = "waiting for hosts"; break;
    }
    job.round = std::max(round_, 0);
    job.rounds = begun_;
    job.restarts = restarts_;
    job.world_size = static_cast<int>(members_.size());
    for (const auto& [node, member] : nodes_) {
        const auto ranks = std::ranges::count(members_, node, &RankIdentity::node);
        job.hosts.push_back({member.hello.host, static_cast<int>(ranks), node == 0});
    }
    for (size_t i = 0; i < members_.size(); ++i) {
        RankStatus& rank = job.ranks.emplace_back();
        rank.rank = static_cast<int>(i);
        const auto node = nodes_.find(members_[i].node);
        if (node != nodes_.end()) rank.host = node->second.hello.host;
        rank.program = options_.programs[static_cast<size_t>(members_[i].program)].name();
        if (i >= ends_.size() || !ends_[i]) continue;
        rank.state = state_of(*ends_[i]);
        rank.host = ends_[i]->host;
    }
}

// --- the end of a round

std::vector<RankEnd> Coordinator::ended() const {
    std::vector<RankEnd> ends;
    for (const auto& end : ends_) {
        if (end) ends.push_back(*end);
    }
    return ends;
}

bool Coordinator::all_ended() const {
    return std::ranges::all_of(ends_, [](const auto& end) { return end.has_value(); });
}

// The end of a process that was replaced explains the failures of ranks that could not continue without it.
std::vector<RankEnd> Coordinator::ends_that_explain() const {
    std::vector<RankEnd> ends = ended();
    for (RankEnd& end : ends) {
        const auto former = replaced_.find(end.rank);
        if (former == replaced_.end()) continue;
        // The process in its place was stopped, or failed in turn because of those ranks.
        const bool explains = std::ranges::any_of(
            ends, [&](const RankEnd& other) { return blames(other, end) && (end.by_agent || blames(end, other)); });
        if (explains) end = former->second;
    }
    return ends;
}

// The failures, root cause first; `lost` gets the root cause and the ranks that were killed from outside.
std::vector<RankEnd> Coordinator::failures_and_lost(std::vector<int>& lost) const {
    std::vector<RankEnd> failures = failures_of(ends_that_explain());
    // What a former process explains must not hide that the one in its place failed.
    if (std::ranges::all_of(failures, &RankEnd::survived)) failures = failures_of(ended());
    // If other ranks failed later, a survived loss counts as a cause like any other.
    if (std::ranges::all_of(failures, &RankEnd::survived)) failures.clear();
    for (const RankEnd& failure : failures) {
        // Others may have failed because of the first one, but not a rank that was killed.
        const bool killed =
            !failure.by_agent && WIFSIGNALED(failure.wait_status) && WTERMSIG(failure.wait_status) == SIGKILL;
        if (killed || !failure.gone.empty() || &failure == &failures.front()) lost.push_back(failure.rank);
    }
    return failures;
}

// Agents end ranks after a signal, and other ranks fail because these are gone: that is the signal's doing.
void Coordinator::excuse_victims(std::vector<RankEnd>& failures) const {
    std::vector<RankEnd> excused = ended();
    std::erase_if(excused, [](const RankEnd& end) { return !end.by_agent; });
    std::erase_if(failures, [](const RankEnd& failure) { return failure.by_agent; });
    for (bool more = true; more;) {
        more = std::erase_if(failures, [&](const RankEnd& failure) {
                   if (!std::ranges::any_of(excused, [&](const RankEnd& end) { return blames(failure, end); }))
                       return false;
                   excused.push_back(failure);
                   return true;
               }) > 0;
    }
}

void Coordinator::conclude(Time now) {
    std::vector<int> lost;
    std::vector<RankEnd> failures = failures_and_lost(lost);
    if (stop_signal_ != 0 && cut_short_ && !failed_first_) {
        excuse_victims(failures);
        if (std::ranges::all_of(failures, &RankEnd::survived)) failures.clear();
    }
    if (stop_signal_ == 0 && reason_ == Reason::change) return conclude_without_failure(now);
    if (failures.empty()) {
        const int code = stop_signal_ == 0 ? 0 : cut_short_ ? 128 + stop_signal_ : options_.preempted_exit_code;
        return finish(code, "", code == 0 ? "" : fmt::format("{} ended the job", signal_name(stop_signal_)));
    }
    if (stop_signal_ != 0) {
        return give_up(failures, options_.max_restarts > 0
                                     ? fmt::format("no restart: {} asked the job to stop", signal_name(stop_signal_))
                                     : "");
    }
    if (!failures.front().gone.empty()) return go_on_after_loss(failures, lost, now);
    go_on_after_failure(failures, lost, now);
}

// The round was ended for hosts that have joined.
void Coordinator::conclude_without_failure(Time now) {
    const std::vector<Node> nodes = chosen_nodes();
    const size_t ranks = ranks_of(nodes);
    if (!has_enough_hosts() || ranks == 0) return gather(now);
    announce("the hosts of the job have changed", ranks, members_.size(),
             fmt::format(" on {}", plural(nodes.size(), "host")), {});
    begin_round();
}

void Coordinator::announce(const std::string& reason, size_t ranks, size_t former, const std::string& how,
                           const std::vector<int>& lost) {
    Json::Array gone;
    for (const int rank : lost) gone.emplace_back(rank);
    order_all(Say{fmt::format("{}; starting round {} with {}{}", reason, round_ + 1, plural(ranks, "rank"), how),
                  "restart",
                  {{"round", round_ + 1},
                   {"world_size", static_cast<int64_t>(ranks)},
                   {"former_world_size", static_cast<int64_t>(former)},
                   {"lost", std::move(gone)},
                   {"reason", readable_utf8(reason)}}});
}

// A lost host changes the membership: as long as enough are left, that costs no restart.
void Coordinator::go_on_after_loss(const std::vector<RankEnd>& failures, const std::vector<int>& lost, Time now) {
    const std::string reason = failures.front().cause();
    const std::vector<Node> nodes = chosen_nodes();
    const size_t ranks = ranks_of(nodes);
    const bool enough = has_enough_hosts() && ranks > 0 && static_cast<int>(ranks) >= options_.min_ranks;
    if (enough) {
        announce(reason, ranks, members_.size(), fmt::format(" on {}", plural(nodes.size(), "host")), lost);
        return begin_round();
    }
    const std::string left = why_not_enough();
    if (restarts_ >= options_.max_restarts) {
        return give_up(failures, options_.max_restarts > 0 ? fmt::format("{}; {} of {} restarts used (--max-restarts)",
                                                                         left, restarts_, options_.max_restarts)
                                                           : left);
    }
    ++restarts_;
    say(fmt::format("{}; {}: waiting up to {:g} s for another, restart {} of {}", reason, left,
                    seconds(hosts_.join_timeout), restarts_, options_.max_restarts));
    gather(now);
}

void Coordinator::go_on_after_failure(const std::vector<RankEnd>& failures, const std::vector<int>& lost, Time now) {
    const RankEnd& root = failures.front();
    auto next = next_round(options_, members_, lost, options_.max_restarts - restarts_);
    if (!next) return give_up(failures, why_no_round(options_, members_, lost, restarts_));
    if (next->uses_restart) ++restarts_;
    const size_t former = members_.size();
    // The ranks of lost hosts are not among them, and those of hosts that wait are to come.
    members_ = std::move(next->members);
    std::erase_if(members_, [&](const RankIdentity& identity) { return !nodes_.contains(identity.node); });
    for (auto& [node, member] : nodes_) member.spent = member.spent || (member.started && seats_of(node).empty());
    const std::string message = root.message();
    const std::string reason = root.cause() + (message.empty() ? "" : ": " + message);
    const std::string how = next->uses_restart ? fmt::format(", restart {} of {}", restarts_, options_.max_restarts)
                                               : fmt::format(" of {}", former);
    const size_t ranks = ranks_of(chosen_nodes());
    if (!has_enough_hosts() || ranks == 0) {
        say(fmt::format("{}; waiting up to {:g} s for more hosts{}", reason, seconds(hosts_.join_timeout), how));
        return gather(now);
    }
    announce(reason, ranks, former, how, lost);
    begin_round();
}

void Coordinator::give_up(const std::vector<RankEnd>& failures, const std::string& why) {
    std::string report = report_of(failures, ends_that_explain(), width_);
    if (!why.empty()) report += fmt::format("\n\n  {}", why);
    report_ = report_json(failures, ended());
    report_.set("why_no_restart", why.empty() ? Json() : Json(why));
    const RankEnd& root = failures.front();
    const std::string pid = root.pid != 0 ? fmt::format("pid {} ", root.pid) : "";
    finish(exit_code_of(failures), report, fmt::format("the job failed: {} ({}on {})", root.cause(), pid, root.host));
}

void Coordinator::fail(int exit_code, const std::string& why) {
    if (state_ == State::finished || state_ == State::deposed) return;
    const std::string text = fmt::format("the coordinating agent failed: {}", why);
    finish(exit_code, "", text);
}

// The coordinating agent, node 0, prints the report; the others a line that points there.
void Coordinator::finish(int exit_code, const std::string& report, const std::string& pointer) {
    state_ = State::finished;
    if (report_.is(Json::Kind::null)) report_ = report_json({}, ended());
    report_.set("exit_code", exit_code);
    report_.set("reason", readable_utf8(pointer));
    report_.set("job", readable_utf8(job_));
    report_.set("rounds", begun_);
    report_.set("restarts", restarts_);
    const auto own = nodes_.find(0);
    const std::string reporter = own != nodes_.end() ? own->second.hello.host : "";
    for (const auto& [node, member] : nodes_) {
        std::string text = node == 0 ? report : pointer;
        if (node != 0 && report != pointer && !report.empty()) {
            text += fmt::format("; the agent on {} prints the report", reporter);
        }
        order(node, Finish{exit_code, std::move(text)});
    }
}

}  // namespace tsr
