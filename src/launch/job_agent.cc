#include "launch/job_agent.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <utility>
#include <variant>

#include "base/dir_at.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/random_id.hpp"
#include "base/terminal.hpp"
#include "base/write_whole.hpp"
#include "comm/host.hpp"
#include "launch/departures.hpp"
#include "launch/metrics_text.hpp"
#include "launch/process.hpp"
#include "store/address.hpp"
#include "store/tcp_store.hpp"

namespace tsr {

namespace {

constexpr milliseconds drain_deadline{2000};
constexpr milliseconds tell_deadline{2000};
constexpr milliseconds beat_pause{1000};
constexpr milliseconds connect_deadline{5000};
constexpr milliseconds patience{1000};  // until a message says that the other agents are not found
constexpr milliseconds farewell{2000};  // for the other agents to hear of the job's end
constexpr size_t max_peers = 4096;

std::vector<int> with_flights(std::vector<int> signals) {
    signals.push_back(SIGUSR1);
    return signals;
}

std::string architecture() {
    utsname name{};
    return ::uname(&name) == 0 ? name.machine : "unknown";
}

// What has to be the same on all hosts, in the order in which a difference is reported.
std::vector<std::string> agreed_by(const RunOptions& options) {
    const HostOptions& hosts = *options.hosts;
    std::vector<std::string> agreed;
    agreed.push_back(fmt::format("--nnodes {}:{}", hosts.min_nodes, hosts.max_nodes));
    for (const auto& [host, port] : hosts.spares) agreed.push_back(fmt::format("--store-hosts {}:{}", host, port));
    agreed.push_back(fmt::format("--max-restarts {}", options.max_restarts));
    agreed.push_back(fmt::format("--min-ranks {}", options.min_ranks));
    constexpr std::array<const char*, 4> words = {"restart", "shrink", "continue", "replace"};
    agreed.push_back(fmt::format("--on-loss {}", words.at(static_cast<size_t>(options.on_loss))));
    for (const Program& program : options.programs) {
        agreed.push_back(fmt::format("the command {}", program.text_for_all_hosts()));
        agreed.push_back(fmt::format("--role {}", program.role));
    }
    return agreed;
}

// Makes blocking calls return once a descriptor is readable.
class InterruptedByAny {
   public:
    InterruptedByAny(int one, int other) : polls_{{{one, POLLIN, 0}, {other, POLLIN, 0}}} {
        set_interrupt(
            [](void* self) {
                auto& polls = static_cast<InterruptedByAny*>(self)->polls_;
                return int32_t{::poll(polls.data(), polls.size(), 0) > 0 ? 1 : 0};
            },
            this);
    }
    ~InterruptedByAny() { set_interrupt(nullptr, nullptr); }
    InterruptedByAny(const InterruptedByAny&) = delete;
    InterruptedByAny& operator=(const InterruptedByAny&) = delete;

   private:
    std::array<pollfd, 2> polls_;
};

}  // namespace

JobAgent::JobAgent(RunOptions options, int guardian, const sigset_t& signal_mask)
    : options_(std::move(options)),
      guardian_(guardian),
      host_(host_name()),
      agent_id_(random_id()),
      token_(!options_.hosts || options_.insecure
                 ? Token::random()
                 : find_token("", is_loopback(options_.hosts->endpoint_host), endpoint())),
      signals_(signal_descriptor(with_flights(options_.stop_signals))),
      events_(options_.events_file),
      logs_(STDOUT_FILENO, STDERR_FILENO),
      ranks_(options_, host_, token_, signal_mask, logs_, events_),
      master_port_(std::make_unique<PortReservation>()),
      questions_(agent_id_),
      job_id_(random_id()),
      run_id_(job_id_) {
    if (!options_.hosts) return;
    StoreOptions link;
    link.insecure = options_.insecure;
    link.job_id = "agents of " + options_.hosts->run_id;
    party_ = handshake::Party::of(link, is_loopback(options_.hosts->endpoint_host), endpoint());
    job_id_ = fmt::format("{} {}", options_.hosts->run_id, job_id_);
    run_id_ = options_.hosts->run_id;
}

std::string JobAgent::endpoint() const {
    return Address{options_.hosts->endpoint_host, options_.hosts->endpoint_port}.uri();
}

int JobAgent::run() {
    if (!open_events()) return 128 + signal_while_idle_;
    int code = 1;
    try {
        code = run_job();
    } catch (...) {
        fail(current_error());
        ranks_.bury();
        (void)write_report();  // what is thrown says more
        throw;
    }
    if (guardian_died_) return code;
    const auto count_loss = [&](const std::string& loss) {
        if (loss.empty()) return;
        if (code == 0) code = 1;
        logs_.say(fmt::format("some output of the job was lost: {}", loss));
    };
    logs_.drain(Deadline::in(drain_deadline));
    count_loss(logs_.losses());
    count_loss(write_report());
    events_.write("end", wall_time(), {{"exit_code", code}});
    events_.write_all(Deadline::in(drain_deadline));
    count_loss(events_.losses());
    logs_.drain(Deadline::in(drain_deadline));
    return code;
}

// Opening a FIFO waits for its reader; a signal ends this wait.
bool JobAgent::open_events() {
    if (events_.open()) return true;
    logs_.say(fmt::format("waiting for a reader of {}", options_.events_file));
    while (!events_.open()) {
        pollfd polls[] = {{signals_.get(), POLLIN, 0}, {guardian_, POLLIN, 0}};
        (void)::poll(polls, std::size(polls), static_cast<int>(poll_slice.count()));
        signalfd_siginfo info{};
        while (signal_while_idle_ == 0 &&
               ::read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
            const int signal = static_cast<int>(info.ssi_signo);
            if (std::ranges::find(options_.stop_signals, signal) != options_.stop_signals.end()) {
                signal_while_idle_ = signal;
            }
        }
        if (polls[1].revents != 0) signal_while_idle_ = SIGKILL;
        if (signal_while_idle_ != 0) return false;
    }
    return true;
}

int JobAgent::run_job() {
    open_metrics();
    if (options_.hosts && !options_.hosts->spares.empty()) {
        begin_with_spares();
    } else if (options_.hosts) {
        join();
    } else {
        coordinate("127.0.0.1");
    }
    while (!exit_code_) turn();
    end_ranks();
    if (!peers_.empty()) {
        const Deadline deadline = Deadline::in(farewell);
        for (auto& [node, peer] : peers_) peer.link.write_all(deadline);
        // They close their ends when they have heard of it.
        const auto open = [](const auto& entry) { return !entry.second.link.ended(); };
        while (std::ranges::any_of(peers_, open) && !deadline.expired()) {
            std::vector<pollfd> polls;
            for (auto& [node, peer] : peers_) polls.push_back(peer.link.poll_entry());
            (void)::poll(polls.data(), polls.size(), static_cast<int>(deadline.slice().count()));
            for (auto& [node, peer] : peers_) (void)peer.link.receive();
        }
    }
    return *exit_code_;
}

// The job has ended while ranks run here, because the agent of another host failed.
void JobAgent::end_ranks() {
    if (!ranks_.in_round()) return;
    coordinator_link_.reset();
    ranks_.hear();
    while (ranks_.in_round()) turn();
}

// --- meeting the other agents

// `socket`: connected to the coordinating agent; -1: in this process.
Hello JobAgent::hello(int socket) {
    Hello hello;
    hello.agent = agent_id_;
    hello.host = host_;
    hello.address = bind_host_;
    hello.architecture = architecture();
    hello.master_port = master_port_->port();
    for (const Program& program : options_.programs) hello.ranks.push_back(program.ranks);
    if (options_.hosts) {
        hello.version = options_.hosts->version;
        hello.node_rank = options_.hosts->node_rank;
        hello.agreed = agreed_by(options_);
        if (socket >= 0) hello.address = local_address_of(socket);
        if (takes_part_) hello.job = job_id_;
        hello.seat = seat_;
        if (election_) {
            hello.ballot = job_id_;
            hello.term = election_->term();
        }
    }
    return hello;
}

void JobAgent::coordinate(const std::string& bind_host) {
    bind_host_ = bind_host;
    open_report();
    coordinator_ = std::make_unique<Coordinator>(options_, job_id_, terminal_width(STDERR_FILENO), Clock::now());
    report(hello());
    pump();
}

void JobAgent::open_report() {
    if (options_.report_file.empty() || report_file_.valid()) return;
    // What is there is of an earlier job.
    const int opened = DirAt::working().open_file(
        options_.report_file, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY, 0644, DirAt::Links::followed);
    if (opened < 0) throw os_error(fmt::format("cannot open the report's file {}", options_.report_file), -opened);
    report_file_ = Fd(opened);
}

// The address on which this agent listens, if it owns the endpoint.
std::optional<std::string> JobAgent::listen_at_endpoint() {
    const HostOptions& hosts = *options_.hosts;
    if (hosts.is_host == false) return std::nullopt;
    std::optional<Error> last;
    const auto own = listen_at({hosts.endpoint_host, hosts.endpoint_port}, "--rdzv-endpoint", last);
    if (!own && hosts.is_host == true && last) {
        throw Error(Code::io, fmt::format("this agent is to own the endpoint (is_host), but {}", last->what()))
            .caused_by(*last);
    }
    return own;
}

// Listens if the address is one of this host's, and no other agent listens there; else `last` says why not.
std::optional<std::string> JobAgent::listen_at(const Address& place, const char* option, std::optional<Error>& last) {
    for (const std::string& numeric : numeric_addresses(place.host)) {
        Address address{numeric, place.port};
        Fd socket;
        try {
            socket = listen_on(address);
        } catch (const Error& error) {
            const int failure = error.record()->native_code;
            if (error.record()->native_domain != NativeDomain::os || failure == EACCES || failure == EPERM) throw;
            last = error;
            if (failure == EADDRINUSE) break;
            continue;
        }
        if (is_loopback(numeric) && numeric != place.host && place.host != "localhost") {
            throw Error(Code::invalid_argument,
                        fmt::format("host name '{}' means {} on this host, where other hosts cannot reach it; give "
                                    "{} a numeric address or a name that means one",
                                    place.host, numeric, option));
        }
        listener_.emplace(std::move(socket), party_);
        return numeric;
    }
    return std::nullopt;
}

// Returns when this agent coordinates, or is connected to the one that does, or must end.
void JobAgent::join() {
    const bool again = welcome_;
    welcome_ = false;
    const HostOptions& hosts = *options_.hosts;
    const Deadline deadline = Deadline::in(hosts.join_timeout);
    const Deadline started = Deadline::in(patience);
    bool told = again;
    std::optional<std::string> own;
    std::optional<Error> last;
    for (milliseconds pause{20}; !exit_code_; pause = std::min(pause * 2, milliseconds{500})) {
        try {
            if (!again) own = listen_at_endpoint();
            if (!own) return join_once(Deadline::in(connect_deadline).earlier(deadline));
        } catch (const Error& error) {
            const bool may_come = error.record()->retriable || error.code() == Code::timeout;
            if (error.code() != Code::interrupted && !may_come) {
                throw Error(error.code(), fmt::format("host {} cannot join the job: {}", host_, error.what()))
                    .caused_by(error);
            }
            if (again && error.record()->native_code == ECONNREFUSED) {
                logs_.say(fmt::format("nobody coordinates the job at {} any more", endpoint()));
                exit_code_ = 1;
                return;
            }
            if (may_come) last = error;
        }
        if (own) return coordinate(*own);
        if (last && !told && started.expired()) {
            told = true;
            logs_.say(fmt::format("host {} tries to join the job for up to {:g} s: {}", host_,
                                  seconds(hosts.join_timeout), last->what()));
        }
        if (deadline.expired()) {
            throw Error(Code::timeout,
                        fmt::format("host {} found no agent of the job at {} within {:g} s (--rdzv-conf join_timeout): "
                                    "{}; start `tessera run` on the host that has that address, with the same "
                                    "--rdzv-endpoint",
                                    host_, endpoint(), seconds(hosts.join_timeout), last ? last->what() : "no answer"));
        }
        std::vector<pollfd> polls{{signals_.get(), POLLIN, 0}, {guardian_, POLLIN, 0}};
        questions_.append_polls(polls);
        (void)::poll(polls.data(), polls.size(), static_cast<int>(pause.count()));
        answer_questions();
        if (polls[1].revents != 0) {
            guardian_died_ = true;
            exit_code_ = 128 + SIGKILL;
        }
        take_signals();
    }
}

void JobAgent::join_once(Deadline deadline) {
    const InterruptedByAny interrupt(signals_.get(), guardian_);
    Channel channel =
        connect_with_handshake({options_.hosts->endpoint_host, options_.hosts->endpoint_port}, party_, deadline);
    coordinator_address_ = remote_address_of(channel.fd());
    coordinator_link_.emplace(std::move(channel));
    coordinator_link_->send(encode(Report(hello(coordinator_link_->socket()))));
}

// --- with spares

Address JobAgent::store_host(int seat) const {
    const HostOptions& hosts = *options_.hosts;
    if (seat == 0) return {hosts.endpoint_host, hosts.endpoint_port};
    const auto& [host, port] = hosts.spares.at(static_cast<size_t>(seat - 1));
    return {host, port};
}

// The owner of the endpoint begins a job, unless a spare coordinates one already; no round begins without more than half
// of the store hosts.
void JobAgent::begin_with_spares() {
    std::optional<Error> last;
    if (const auto own = listen_at_endpoint()) {
        seat_ = 0;
        coordinate(*own);
    }
    for (int seat = 1; seat_ < 0 && seat < options_.hosts->seats(); ++seat) {
        std::optional<Error> refused;
        if (const auto own = listen_at(store_host(seat), "--store-hosts", refused)) {
            seat_ = seat;
            bind_host_ = *own;
        }
        if (refused && !(last && last->record()->native_code == EADDRINUSE)) last = std::move(refused);
    }
    if (seat_ < 0 && last && last->record()->native_code == EADDRINUSE) {
        logs_.say(fmt::format("this host is named by --store-hosts, but has no vote: {}", last->what()));
    }
    search();
}

void JobAgent::search() {
    std::map<int, Address> others;
    for (int seat = 0; seat < options_.hosts->seats(); ++seat) {
        if (seat != seat_) others.emplace(seat, store_host(seat));
    }
    contacts_.emplace(std::move(others), party_, options_.hosts->silence);
    search_deadline_ = Deadline::in(options_.hosts->join_timeout);
    if (election_ && !coordinator_) election_->lose(Clock::now());
}

void JobAgent::tend_contacts() {
    if (!contacts_) return;
    if (coordinator_ && coordinator_->round() >= 0) return contacts_.reset();
    for (Contacts::News& news : contacts_->turn()) {
        if (news.opened) {
            contacts_->send(news.seat, encode(Report(hello(contacts_->socket(news.seat)))));
            if (const auto stand = question()) contacts_->send(news.seat, encode(Report(*stand)));
        }
        for (const Json& message : news.messages) {
            Order order;
            try {
                order = decode_order(message);
            } catch (const Error& error) {
                if (contacts_) contacts_->drop(news.seat);
                if (coordinator_link_) coordinator_link_->end(error.what());
                break;
            }
            if (contacts_) {
                hear_of_search(news.seat, order);
            } else if (coordinator_link_) {  // the connection has become that to the coordinating agent
                obey(std::move(order));
            }
            if (exit_code_) return;
        }
        if (!contacts_) return;
    }
    if (coordinator_) return;
    if (election_) {
        election_->tick(Clock::now());
        ask();
    }
    if (!search_deadline_.expired()) return;
    logs_.say(
        fmt::format("host {} found no agent that coordinates the job within {:g} s (--rdzv-conf join_timeout); more "
                    "than half of the {} store hosts are needed (--store-hosts): {}",
                    host_, seconds(options_.hosts->join_timeout), options_.hosts->seats(), contacts_->why()));
    exit_code_ = 1;
}

std::optional<Stand> JobAgent::question() const {
    return election_ && !coordinator_ ? election_->question() : std::nullopt;
}

void JobAgent::ask() {
    if (const auto stand = election_->new_question()) contacts_->send_all(encode(Report(*stand)));
}

void JobAgent::hear_of_search(int seat, const Order& order) {
    if (const auto* welcome = std::get_if<Welcome>(&order)) {
        const bool is_old =
            welcome->job == job_id_ && (welcome->term < term_ || (election_ && welcome->term < election_->term()));
        const bool is_other = takes_part_ && welcome->job != job_id_;
        if (is_old || is_other || contacts_->socket(seat) < 0) return contacts_->drop(seat);
        if (coordinator_) {  // of a job that has not begun
            coordinator_.reset();
            election_.reset();
            reports_.clear();
            peers_.clear();
        }
        coordinator_link_.emplace(contacts_->take(seat));
        coordinator_address_ = remote_address_of(coordinator_link_->socket());
        coordinator_uri_ = store_host(seat).uri();
        contacts_.reset();
        obey(order);
    } else if (const auto* vote = std::get_if<Vote>(&order)) {
        if (!election_ || coordinator_) return;
        if (election_->count(seat, *vote)) return lead();
        ask();
    } else if (std::holds_alternative<Refused>(order) && !coordinator_) {
        obey(order);
    }
}

void JobAgent::lead() {
    const int term = election_->term();
    election_->follow(term);
    contacts_.reset();
    const bool enough = group_size_ == 0 || group_size_ - 1 >= options_.hosts->min_nodes;
    const Coordinator::Succession succession{term, restarts_ + (enough ? 0 : 1), std::max(group_size_ - 1, 0),
                                             rounds_begun_};
    try {
        open_report();
    } catch (const Error& error) {
        logs_.say(error.what());
    }
    logs_.say(fmt::format("host {} coordinates the job from now on, term {}", host_, term));
    coordinator_ =
        std::make_unique<Coordinator>(options_, job_id_, terminal_width(STDERR_FILENO), Clock::now(), succession);
    led_since_ = Clock::now();
    report(hello());
    if (stop_asked_ != 0 && stop_heard_ == 0) report(StopAsked{stop_asked_});
    for (auto& [node, peer] : peers_) {
        if (peer.hello) reports_.emplace_back(node, *peer.hello);
    }
    pump();
}

// Others may have another coordinating agent by now: this one is a host like them.
void JobAgent::stand_down() {
    lost_link_ = fmt::format("fewer than {} of {} store hosts follow it (--store-hosts)",
                             Election::majority_of(options_.hosts->seats()), options_.hosts->seats());
    coordinator_host_ = host_;
    coordinator_uri_ = store_host(seat_).uri();
    coordinator_.reset();
    reports_.clear();
    peers_.clear();
    own_client_.reset();
    store_.reset();
    if (ranks_.in_round()) ranks_.hear();
}

// The coordinating agent has ended, dropped this host or cannot be reached; no rank of this host lives any more.
void JobAgent::rejoin_or_end() {
    const HostOptions& hosts = *options_.hosts;
    const std::string why = std::exchange(lost_link_, "");
    bool may = welcome_ && (hosts.min_nodes < hosts.max_nodes || options_.max_restarts > 0);
    if (!hosts.spares.empty()) {
        const bool enough = group_size_ == 0 || group_size_ - 1 >= hosts.min_nodes;
        may = welcome_ && stop_heard_ == 0 && (enough || restarts_ < options_.max_restarts);
    }
    coordinator_link_.reset();
    const std::string lost = fmt::format("lost the coordinating agent on host {} at {}: {}", coordinator_host_,
                                         coordinator_uri_.empty() ? endpoint() : coordinator_uri_, why);
    if (!may) {
        logs_.say(lost + "; the ranks of this host were ended");
        exit_code_ = stop_heard_ == 0 ? 1 : 128 + stop_heard_;
        return;
    }
    logs_.say(fmt::format("{}; trying to join again for up to {:g} s", lost, seconds(hosts.join_timeout)));
    if (!hosts.spares.empty()) return search();
    join();
}

// --- the loop

// Waits for whatever comes first: output, a signal, a message, the guardian's death, a deadline.
void JobAgent::turn() {
    std::vector<pollfd> polls;
    polls.push_back({signals_.get(), POLLIN, 0});
    polls.push_back({guardian_died_ ? -1 : guardian_, POLLIN, 0});
    const size_t own = polls.size();
    logs_.append_polls(polls);
    const size_t of_logs = polls.size() - own;
    events_.append_polls(polls);
    questions_.append_polls(polls);
    if (listener_) listener_->append_polls(polls);
    for (const auto& [node, peer] : peers_) polls.push_back(peer.link.poll_entry());
    if (coordinator_link_) polls.push_back(coordinator_link_->poll_entry());
    if (contacts_) contacts_->append_polls(polls);
    if (::poll(polls.data(), polls.size(), timeout_ms()) < 0 && errno != EINTR) throw os_error("poll", errno);
    logs_.handle_polls(polls.data() + own, of_logs);
    events_.write_some();
    if (polls[1].revents != 0) {
        guardian_died_ = true;
        ranks_.kill();
        if (!ranks_.in_round()) exit_code_ = 128 + SIGKILL;
    }
    take_signals();
    if (ranks_.in_round()) {  // one SIGCHLD may stand for many
        // Without its guardian this host is leaving: the coordinator hears of that when the connection ends.
        for (RankEnd& end : ranks_.reap()) {
            if (!guardian_died_) report(RankEnded{ranks_.round(), std::move(end)});
        }
    }
    pump();
    ranks_.pass_deadline();
    ranks_.renew_directory();
    end_round_if_over();
    if (options_.hosts) {
        tend_peers();
        tend_coordinator();
        tend_contacts();
        beat();
    }
    if (coordinator_) coordinator_->tick(Clock::now());
    pump();
    answer_questions();
}

int JobAgent::timeout_ms() const {
    Deadline next = ranks_.next_deadline().earlier(questions_.next_deadline());
    if (coordinator_) {
        if (const auto tick = coordinator_->next_tick()) next = next.earlier(Deadline(*tick));
    }
    if (options_.hosts) next = next.earlier(Deadline(last_beat_ + beat_pause));
    if (contacts_) next = next.earlier(Deadline::in(poll_slice));
    return static_cast<int>(next.remaining().count());
}

void JobAgent::take_signals() {
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
        const int signal = static_cast<int>(info.ssi_signo);
        if (signal == SIGCHLD) continue;
        if (std::ranges::find(options_.stop_signals, signal) == options_.stop_signals.end()) {  // SIGUSR1
            report(FlightsAsked{});
        } else if (exit_code_) {
            ranks_.kill();
        } else if (!coordinator_ && !ranks_.in_round() &&
                   (!takes_part_ || !coordinator_link_ || signal_while_idle_ != 0)) {
            logs_.say(fmt::format("{}: host {} leaves the job", signal_name(signal), host_));
            exit_code_ = 128 + signal;
        } else {
            if (!ranks_.in_round()) signal_while_idle_ = signal;
            if (!coordinator_) stop_asked_ = signal;
            report(StopAsked{signal});
        }
        pump();
    }
}

void JobAgent::end_round_if_over() {
    if (!ranks_.in_round() || !ranks_.all_ended()) return;
    const bool cut_short = ranks_.is_ending();
    std::vector<RankEnd> ends = ranks_.bury();
    if (guardian_died_) {
        exit_code_ = 128 + SIGKILL;
        return;
    }
    for (RankEnd& end : ends) report(RankDetails{ranks_.round(), std::move(end)});
    master_port_ = std::make_unique<PortReservation>();
    report(RoundOver{ranks_.round(), cut_short, master_port_->port()});
    pump();
}

// --- messages

void JobAgent::report(Report report) {
    if (coordinator_) {
        reports_.emplace_back(0, std::move(report));
    } else if (coordinator_link_) {
        coordinator_link_->send(encode(report));
    }
}

void JobAgent::pump() {
    if (!coordinator_) return;
    for (;;) {
        while (!reports_.empty()) {
            const auto [node, report] = std::move(reports_.front());
            reports_.pop_front();
            departures_changed_ = departures_changed_ || std::holds_alternative<RankEnded>(report);
            coordinator_->take(node, report, Clock::now());
        }
        std::vector<Coordinator::Addressed> orders = coordinator_->take_orders();
        if (orders.empty()) break;
        for (Coordinator::Addressed& addressed : orders) {
            if (auto* start = std::get_if<StartRound>(&addressed.order)) serve_store(*start);
            if (addressed.node == 0) {
                obey(std::move(addressed.order));
            } else if (const auto peer = peers_.find(addressed.node); peer != peers_.end()) {
                peer->second.link.send(encode(addressed.order));
            }
        }
    }
    tell_ranks_of_departures();
}

void JobAgent::obey(Order order) {
    if (const auto* welcome = std::get_if<Welcome>(&order)) {
        if (takes_part_ && welcome->job != job_id_) {
            logs_.say(fmt::format("another job runs at {} by now", endpoint()));
            exit_code_ = 1;
            return;
        }
        welcome_ = true;
        if (options_.hosts) {
            if (welcome->job != job_id_) election_.reset();
            job_id_ = welcome->job;
            run_id_ = welcome->run;
            coordinator_host_ = welcome->host;
            term_ = welcome->term;
            if (!welcome->votes) election_.reset();
            if (welcome->votes && !election_) election_.emplace(seat_, options_.hosts->seats());
            if (election_) election_->follow(term_);
        }
        // The former coordinating agent may not have heard of it.
        if (stop_asked_ != 0 && stop_heard_ == 0) report(StopAsked{stop_asked_});
    } else if (const auto* refused = std::get_if<Refused>(&order)) {
        logs_.say(fmt::format("this host cannot join the job: {}", refused->why));
        exit_code_ = 1;
    } else if (auto* start = std::get_if<StartRound>(&order)) {
        start_round(std::move(*start));
    } else if (const auto* end = std::get_if<EndRanks>(&order)) {
        if (end->manner == EndRanks::Manner::stop) stop_heard_ = end->signal;
        if (!ranks_.in_round()) return;
        switch (end->manner) {
            case EndRanks::Manner::failure: return ranks_.hear();
            case EndRanks::Manner::stop: return ranks_.stop(end->signal);
            case EndRanks::Manner::change: return ranks_.change();
        }
    } else if (const auto* replace = std::get_if<ReplaceRank>(&order)) {
        if (!ranks_.in_round() || replace->round != ranks_.round()) return;
        keep_newest_save();
        if (auto former = ranks_.replace(replace->rank)) report(RankDetails{replace->round, std::move(*former)});
    } else if (std::holds_alternative<WriteFlights>(order)) {
        if (ranks_.in_round()) ranks_.write_flights();
    } else if (std::holds_alternative<Listening>(order)) {
        ranks_.hear_of_listener();
    } else if (auto* say = std::get_if<Say>(&order)) {
        if (say->event == "replace") ++restarts_;
        if (!say->text.empty()) logs_.say(say->text);
        if (!say->event.empty()) events_.write(say->event.c_str(), wall_time(), std::move(say->fields));
    } else if (const auto* finish = std::get_if<Finish>(&order)) {
        if (!finish->text.empty()) logs_.say(finish->text);
        exit_code_ = finish->exit_code;
    }
}

void JobAgent::start_round(StartRound order) {
    for (const Seat& seat : order.seats) {
        if (static_cast<size_t>(seat.program) < options_.programs.size()) continue;
        throw Error(Code::corrupt, fmt::format("the coordinating agent ordered program {} of {}", seat.program,
                                               options_.programs.size()));
    }
    if (order.seats.empty() || ranks_.in_round()) throw Error(Code::corrupt, "a round was ordered that cannot begin");
    takes_part_ = true;
    group_size_ = order.group_size;
    restarts_ = order.restarts;
    told_of_listener_ = false;
    ++rounds_begun_;
    keep_newest_save();  // those who wrote it may be gone soon
    const std::string uri = coordinator_ ? store_->uri() : Address{coordinator_address_, order.store_port}.uri();
    ranks_.start({std::move(order), uri, job_id_, run_id_});
}

// --- the coordinating agent

StoreOptions JobAgent::store_options() const {
    StoreOptions store;
    store.token = token_.hex();
    store.insecure = options_.insecure;
    store.job_id = job_id_;
    store.epoch = static_cast<uint64_t>(coordinator_->round());
    store.timeout = tell_deadline;
    return store;
}

// The first order of a round makes its store.
void JobAgent::serve_store(StartRound& order) {
    if (store_round_ != order.round) {
        own_client_.reset();
        store_.reset();
        store_ = StoreServer::start(bind_host_, 0, store_options());
        store_round_ = order.round;
    }
    order.store_port = store_->port();
}

// A rank may be waiting for an ended rank to join; an end with exit code 0 is not a failure that ends the job.
void JobAgent::tell_ranks_of_departures() {
    if (!std::exchange(departures_changed_, false) || coordinator_->finished()) return;
    if (coordinator_->all_ended() || ranks_.is_ending()) return;
    std::vector<Departure> departures;
    for (const RankEnd& end : coordinator_->ended()) departures.push_back(departure_of(end.rank, end.wait_status));
    try {
        if (!own_client_) own_client_ = Store::open(store_->uri(), store_options());
        tell_departures(*own_client_, departures, Deadline::in(tell_deadline));
    } catch (const Error& error) {
        logs_.say(fmt::format("cannot tell the ranks which ranks have ended: {}", error.what()));
    }
}

void JobAgent::tend_peers() {
    if (!listener_) return;
    std::vector<std::string> refusals;
    for (Channel& channel : listener_->turn(refusals)) {
        if (peers_.size() < max_peers) peers_.try_emplace(next_node_++, std::move(channel));
    }
    for (const std::string& refusal : refusals) {
        if (refusals_told_++ < 3) logs_.say(refusal + (refusals_told_ == 3 ? "; further ones are not reported" : ""));
    }
    std::vector<std::pair<Coordinator::Node, std::string>> lost;
    for (auto& [node, peer] : peers_) {
        peer.link.write_some();
        for (const Json& message : peer.link.receive()) {
            try {
                hear(node, peer, decode_report(message));
            } catch (const Error& error) {
                peer.link.end(error.what());
                break;
            }
        }
        if (!peer.link.ended() && Clock::now() - peer.link.heard() > options_.hosts->silence) {
            peer.link.end(fmt::format("its agent has not been heard for {:g} s", seconds(options_.hosts->silence)));
        }
        if (peer.link.ended()) lost.emplace_back(node, peer.link.why());
    }
    pump();  // what they said before
    for (const auto& [node, why] : lost) {
        if (const auto gone = peers_.find(node); gone != peers_.end()) {
            save_ = newest_save(gone->second.figures.ranks, save_);
        }
        peers_.erase(node);
        if (!coordinator_) continue;
        coordinator_->lose(node, why, Clock::now());
        departures_changed_ = true;
    }
    const bool is_late = coordinator_ && term_ > 0 && coordinator_->round() < Coordinator::first_round(term_) &&
                         !coordinator_->has_majority() && Clock::now() - led_since_ > options_.hosts->silence;
    if (coordinator_ && (coordinator_->deposed() || is_late)) return stand_down();
    pump();
}

void JobAgent::hear(Coordinator::Node node, Peer& peer, Report report) {
    if (const auto* beat = std::get_if<Beat>(&report)) {
        const double ahead = beat->time - wall_time();  // less the time on the way
        peer.clock_ahead = std::max(peer.clock_ahead.value_or(ahead), ahead);
        return;
    }
    if (auto* figures = std::get_if<Figures>(&report)) {
        const double ahead = peer.clock_ahead.value_or(0);
        for (RankStatus& rank : figures->ranks) {
            if (!rank.figures) continue;
            for (double* time : {&rank.figures->step_time, &rank.figures->save.time}) {
                if (*time > 0) *time -= ahead;
            }
        }
        peer.figures = std::move(*figures);
        return;
    }
    // Times become this host's.
    const auto shift = [&](RankEnd& end) {
        const double ahead = peer.clock_ahead.value_or(0);
        end.time -= ahead;
        for (auto* error : {&end.error, &end.failure}) {
            if (*error && (*error)->timestamp > 0) (*error)->timestamp -= ahead;
        }
    };
    if (const auto* stand = std::get_if<Stand>(&report)) {
        const bool belongs = peer.hello && peer.hello->ballot == job_id_;
        const bool may_vote = belongs && election_ && !coordinator_;
        const Vote no{stand->term, stand->binding, false, election_ ? election_->term() : 0};
        peer.link.send(encode(Order(may_vote ? election_->answer(*stand, Clock::now()) : no)));
        return;
    }
    if (const auto* hello = std::get_if<Hello>(&report); hello != nullptr && !options_.hosts->spares.empty()) {
        if (!hello->job.empty() && hello->job != job_id_) return peer.link.end("it belongs to another job");
        peer.hello = *hello;
    }
    if (!coordinator_) return;
    if (auto* ended = std::get_if<RankEnded>(&report)) shift(ended->end);
    if (auto* details = std::get_if<RankDetails>(&report)) shift(details->end);
    reports_.emplace_back(node, std::move(report));
}

// --- the others

void JobAgent::tend_coordinator() {
    if (exit_code_) return;
    if (!lost_link_.empty()) {
        if (!ranks_.in_round()) rejoin_or_end();
        return;
    }
    if (!coordinator_link_) return;
    coordinator_link_->write_some();
    for (const Json& message : coordinator_link_->receive()) {
        Order order;
        try {
            order = decode_order(message);
        } catch (const Error& error) {
            coordinator_link_->end(error.what());
            break;
        }
        obey(std::move(order));
        if (exit_code_) return;
    }
    if (!coordinator_link_->ended() && Clock::now() - coordinator_link_->heard() > options_.hosts->silence) {
        coordinator_link_->end(fmt::format("it has not been heard for {:g} s", seconds(options_.hosts->silence)));
    }
    if (!coordinator_link_->ended()) return;
    lost_link_ = coordinator_link_->why();
    if (election_) election_->lose(Clock::now());  // it may vote while its ranks end
    if (ranks_.in_round()) ranks_.hear();
}

void JobAgent::beat() {
    if (ranks_.in_round() && !told_of_listener_ && ranks_.listens()) {
        told_of_listener_ = true;
        report(Listening{});
    }
    if (Clock::now() - last_beat_ < beat_pause) return;
    last_beat_ = Clock::now();
    const Beat beat{wall_time()};
    for (auto& [node, peer] : peers_) peer.link.send(encode(Order(beat)));
    if (contacts_) contacts_->send_all(encode(Report(beat)));
    if (!coordinator_link_ || !welcome_) return;
    coordinator_link_->send(encode(Report(beat)));
    if (!ranks_.in_round()) return;
    Figures figures{ranks_.round(), ranks_.status()};
    for (RankStatus& rank : figures.ranks) rank.program.clear();  // known there, and of any length
    coordinator_link_->send(encode(Report(std::move(figures))));
}

// --- questions

JobStatus JobAgent::status() const {
    JobStatus job;
    job.job = job_id_;
    job.run = run_id_;
    job.host = host_;
    job.launcher = ::getppid();
    job.time = wall_time();
    job.started = started_;
    job.max_restarts = options_.max_restarts;
    job.coordinates = coordinator_ != nullptr;
    for (const Program& program : options_.programs) job.programs.push_back(program.name());
    std::vector<RankStatus> known = ranks_.status();
    if (coordinator_) {
        coordinator_->describe(job);
        if (ranks_.order().round != job.round) known.clear();
        for (const auto& [node, peer] : peers_) {
            if (peer.figures.round != job.round) continue;
            known.insert(known.end(), peer.figures.ranks.begin(), peer.figures.ranks.end());
        }
        for (RankStatus& rank : known) {
            const auto place = static_cast<size_t>(rank.rank);
            if (place >= job.ranks.size() || job.ranks[place].host != rank.host) continue;
            job.ranks[place].pid = rank.pid;
            job.ranks[place].figures = rank.figures;
        }
    } else {
        const StartRound& round = ranks_.order();
        job.state = ranks_.in_round() ? "running" : "waiting for hosts";
        job.round = round.round;
        job.rounds = rounds_begun_;
        job.restarts = restarts_;
        job.world_size = round.world_size;
        job.hosts.push_back({host_, static_cast<int>(known.size()), false});
        job.ranks = std::move(known);
    }
    job.save = newest_save(job.ranks, save_);
    return job;
}

void JobAgent::keep_newest_save() {
    save_ = newest_save(ranks_.status(), save_);
    for (const auto& [node, peer] : peers_) save_ = newest_save(peer.figures.ranks, save_);
}

void JobAgent::answer_questions() {
    questions_.turn([this](std::string_view path) -> std::optional<StatusPage> {
        if (path == "/status") return StatusPage{"application/json", to_json(status()).dump() + "\n"};
        if (path == "/metrics") {
            return StatusPage{"text/plain; version=0.0.4; charset=utf-8", metrics_text(status())};
        }
        return std::nullopt;
    });
}

void JobAgent::open_metrics() {
    if (options_.metrics_host.empty()) return;
    Address address{options_.metrics_host, options_.metrics_port};
    try {
        questions_.listen(listen_on(address));
    } catch (const Error& error) {
        throw error.with_advice("--metrics-port needs an address of this host and a free port");
    }
    const bool v6 = address.host.find(':') != std::string::npos;
    logs_.say(
        fmt::format("metrics are at http://{}:{}/metrics", v6 ? "[" + address.host + "]" : address.host, address.port));
}

std::string JobAgent::write_report() const {
    if (!report_file_.valid() || !coordinator_) return "";
    if (write_whole(report_file_.get(), coordinator_->report().dump() + "\n")) return "";
    return os_error(fmt::format("cannot write the report's file {}", options_.report_file), errno).what();
}

// This agent cannot go on; the others hear of it.
void JobAgent::fail(const Error& error) {
    const Deadline deadline = Deadline::in(farewell);
    if (coordinator_) {
        coordinator_->fail(exit_code_of(error), error.what());
        for (const auto& [node, order] : coordinator_->take_orders()) {
            const auto peer = peers_.find(node);
            if (peer == peers_.end()) continue;
            peer->second.link.send(encode(order));
            peer->second.link.write_all(deadline);
        }
    } else if (coordinator_link_) {
        report(NodeFailed{error.what(), exit_code_of(error)});
        coordinator_link_->write_all(deadline);
    }
}

}  // namespace tsr
