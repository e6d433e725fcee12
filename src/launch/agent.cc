#include "launch/agent.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <set>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/proc.hpp"
#include "base/terminal.hpp"
#include "base/write_whole.hpp"
#include "comm/host.hpp"
#include "launch/departures.hpp"
#include "launch/error_file.hpp"
#include "launch/report.hpp"
#include "launch/variables.hpp"
#include "launch/worker_environment.hpp"

namespace tsr {

namespace {

constexpr milliseconds burial_deadline{10000};
constexpr milliseconds drain_deadline{2000};
constexpr milliseconds tell_deadline{2000};
constexpr milliseconds hearing_deadline{100};  // for ranks that waited for a failed rank to report it
constexpr milliseconds notice_deadline{3000};  // for a rank that is still starting
constexpr milliseconds renewal_pause{3600'000};

std::string random_id() {
    const Token token = Token::random();
    return token.hex().substr(0, 16);
}

// The token in memory that ranks can read and others cannot; it disappears with the agent.
Fd token_memory(const Token& token) {
    Fd file(::memfd_create("tessera-token", MFD_CLOEXEC));
    const std::string text = token.hex() + "\n";
    if (!file.valid() || ::fchmod(file.get(), 0600) != 0 || !write_whole(file.get(), text)) {
        throw os_error("cannot store the job token", errno);
    }
    // Ranks get it read-only.
    Fd reader(::open(fmt::format("/proc/self/fd/{}", file.get()).c_str(), O_RDONLY | O_CLOEXEC));
    if (!reader.valid()) throw os_error("cannot store the job token", errno);
    return reader;
}

Fd signal_descriptor(const std::vector<int>& stop_signals) {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGCHLD, SIGUSR1}) sigaddset(&set, signal);
    for (const int signal : stop_signals) sigaddset(&set, signal);
    if (const int error = ::pthread_sigmask(SIG_BLOCK, &set, nullptr)) throw os_error("pthread_sigmask", error);
    Fd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd.valid()) throw os_error("signalfd", errno);
    return fd;
}

// The directory of a round, inside one named by the user or the agent's own.
DirAt made_directory(const std::string& in, const std::string& name) {
    DirAt above;
    DirAt made;
    int error = DirAt::open_or_make(in, above);
    if (error == 0) error = above.open_or_make_below(name, 0777, made);
    if (error != 0) throw os_error(fmt::format("cannot create directory {}/{}", in, name), -error);
    return made;
}

std::string round_name(int round) { return fmt::format("round-{}", round); }

// The name of a file in the directory of its round.
std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string plural(int count, const char* noun) { return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s"); }

double seconds(milliseconds span) { return std::chrono::duration<double>(span).count(); }

}  // namespace

Agent::Agent(RunOptions options, int guardian, const sigset_t& signal_mask)
    : options_(std::move(options)),
      guardian_(guardian),
      signal_mask_(signal_mask),
      open_files_(raise_open_files()),
      host_(host_name()),
      token_(Token::random()),
      job_id_(random_id()),
      token_file_(token_memory(token_)),
      signals_(signal_descriptor(options_.stop_signals)),
      events_(options_.events_file),
      logs_(STDOUT_FILENO, STDERR_FILENO) {
    if (options_.log_directory.empty()) own_directory_.emplace();
    error_directory_ = own_directory_ ? own_directory_->path() : options_.log_directory;
}

int Agent::run() {
    if (!open_events()) return 128 + stop_signal_;
    int code = run_rounds();
    if (guardian_died_) return code;
    const auto count_loss = [&](const std::string& loss) {
        if (loss.empty()) return;
        if (code == 0) code = 1;
        logs_.say(fmt::format("some output of the job was lost: {}", loss));
    };
    logs_.drain(Deadline::in(drain_deadline));
    count_loss(logs_.losses());
    events_.write("end", wall_time(), {{"exit_code", code}});
    events_.write_all(Deadline::in(drain_deadline));
    count_loss(events_.losses());
    logs_.drain(Deadline::in(drain_deadline));
    return code;
}

// Opening a FIFO waits for its reader; a signal ends this wait.
bool Agent::open_events() {
    if (events_.open()) return true;
    logs_.say(fmt::format("waiting for a reader of {}", options_.events_file));
    while (!events_.open()) {
        pollfd polls[] = {{signals_.get(), POLLIN, 0}, {guardian_, POLLIN, 0}};
        (void)::poll(polls, std::size(polls), static_cast<int>(poll_slice.count()));
        signalfd_siginfo info{};
        while (stop_signal_ == 0 && ::read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
            const int signal = static_cast<int>(info.ssi_signo);
            if (std::ranges::find(options_.stop_signals, signal) != options_.stop_signals.end()) stop_signal_ = signal;
        }
        if (polls[1].revents != 0) stop_signal_ = SIGKILL;
        if (stop_signal_ != 0) return false;
    }
    return true;
}

int Agent::run_rounds() {
    for (const Program& program : options_.programs) (void)find_executable(program.command.front());
    std::vector<RankIdentity> members = first_round(options_);
    for (;; ++round_) {
        const Outcome outcome = run_round(members);
        if (guardian_died_) return 128 + SIGKILL;
        if (outcome.failures.empty()) {
            const bool cut_short = is_ending();
            if (stop_signal_ == 0) return 0;
            return cut_short ? 128 + stop_signal_ : options_.preempted_exit_code;
        }
        const int code = exit_code_of(outcome.failures);
        auto next = stop_signal_ != 0 ? std::nullopt
                                      : next_round(options_, members, outcome.lost, options_.max_restarts - restarts_);
        if (!next) {
            std::string report = report_of(outcome.failures, outcome.ends, terminal_width(STDERR_FILENO));
            const std::string why = stop_signal_ == 0 ? why_no_round(options_, members, outcome.lost, restarts_)
                                    : options_.max_restarts > 0
                                        ? fmt::format("no restart: {} asked the job to stop", signal_name(stop_signal_))
                                        : "";
            if (!why.empty()) report += fmt::format("\n\n  {}", why);
            logs_.say(report);
            return code;
        }
        if (next->uses_restart) ++restarts_;
        const RankEnd& root = outcome.failures.front();
        const std::string message = root.message();
        const std::string reason = root.cause() + (message.empty() ? "" : ": " + message);
        logs_.say(fmt::format("{}; starting round {} with {}{}", reason, round_ + 1,
                              plural(static_cast<int>(next->members.size()), "rank"),
                              next->uses_restart ? fmt::format(", restart {} of {}", restarts_, options_.max_restarts)
                                                 : fmt::format(" of {}", members.size())));
        Json::Array lost;
        for (const int rank : outcome.lost) lost.emplace_back(rank);
        events_.write("restart", wall_time(),
                      {{"round", round_ + 1},
                       {"world_size", static_cast<int64_t>(next->members.size())},
                       {"former_world_size", static_cast<int64_t>(members.size())},
                       {"lost", std::move(lost)},
                       {"reason", reason}});
        members = std::move(next->members);
    }
}

Agent::Outcome Agent::run_round(const std::vector<RankIdentity>& members) {
    stage_ = Stage::running;
    page_.begin_round();
    workers_.clear();
    failed_ = false;
    store_ = StoreServer::start("127.0.0.1", 0, store_options());
    master_port_ = std::make_unique<PortReservation>();
    try {
        start_workers(members);
        while (!all_ended()) turn();
    } catch (...) {
        bury_round();
        throw;
    }
    bury_round();
    own_client_.reset();
    store_.reset();
    master_port_.reset();
    return outcome();
}

StoreOptions Agent::store_options() const {
    StoreOptions store;
    store.token = token_.hex();
    store.insecure = options_.insecure;
    store.job_id = job_id_;
    store.epoch = static_cast<uint64_t>(round_);
    store.timeout = tell_deadline;
    return store;
}

void Agent::start_workers(const std::vector<RankIdentity>& members) {
    round_directory_ = made_directory(error_directory_, round_name(round_));
    if (!options_.trace_directory.empty()) (void)made_directory(options_.trace_directory, round_name(round_));
    for (const Stream stream : both_streams) {
        const bool is_out = stream == Stream::out;
        const auto& texts = is_out ? options_.output.out_filters : options_.output.err_filters;
        if (!texts.empty()) {
            logs_.duplicate(stream, texts, open_log(is_out ? "filtered_stdout.log" : "filtered_stderr.log"));
        }
    }
    if (options_.bind != Bind::none) {
        processors_ = processors_of_ranks(options_.bind, read_topology("", allowed_processors()),
                                          static_cast<int>(members.size()),
                                          nodes_of_devices("", env_text("CUDA_VISIBLE_DEVICES")));
    }
    workers_.reserve(members.size());
    for (int rank = 0; rank < static_cast<int>(members.size()); ++rank) start_worker(rank, members);
}

std::string Agent::trace_directory() const {
    return fmt::format("{}/{}", options_.trace_directory, round_name(round_));
}

void Agent::start_worker(int rank, const std::vector<RankIdentity>& members) {
    Worker worker;
    worker.member = members[static_cast<size_t>(rank)];
    const Program& program = options_.programs[static_cast<size_t>(worker.member.program)];
    const std::string stem = fmt::format("{}/{}/rank-{}", error_directory_, round_name(round_), rank);
    worker.error_file = stem + ".error.json";
    worker.failure_file = stem + ".failure.json";
    const int local_rank = rank;
    RankOutput output = open_output(rank, local_rank, worker);
    if (!options_.log_directory.empty()) {
        // Existing files are from an earlier job with the same directory.
        for (const std::string& file : {worker.error_file, worker.failure_file}) {
            (void)round_directory_.remove_file(file_name(file));
        }
    }
    auto [out_read, out_write] = make_pipe();
    auto [err_read, err_write] = make_pipe();
    Spawn order;
    order.path = find_executable(program.command.front());
    order.arguments = program.command_of(local_rank);
    if (!processors_.empty()) order.processors = processors_[static_cast<size_t>(local_rank)];
    order.environment = environment_of(rank, members, worker);
    order.input = rank == 0 ? STDIN_FILENO : -1;  // as mpirun does: one reader
    order.output = out_write.get();
    order.error = err_write.get();
    order.inherited = {page_.fd(), page_.asked_fd()};
    if (!options_.insecure) order.inherited.push_back(token_file_.get());
    order.signal_mask = signal_mask_;
    order.open_files = open_files_;
    worker.pid = spawn(order);
    logs_.add_rank(rank, std::move(out_read), std::move(err_read), std::move(output));
    events_.write("start", wall_time(),
                  {{"round", round_},
                   {"rank", rank},
                   {"pid", static_cast<int64_t>(worker.pid)},
                   {"host", host_},
                   {"program", program.name()},
                   {"world_size", static_cast<int64_t>(members.size())}});
    workers_.push_back(std::move(worker));
}

// A stream that --redirects or --tee names has its own file; others share the rank's log, if a directory is named.
RankOutput Agent::open_output(int rank, int local_rank, Worker& worker) {
    const Program& program = options_.programs[static_cast<size_t>(worker.member.program)];
    const OutputOptions& wanted = options_.output;
    RankOutput output;
    if (!wanted.prefix_template.empty()) {
        output.prefix = expand_prefix(wanted.prefix_template, {rank, local_rank, program.role, host_});
        output.names_rank = wanted.prefix_template.find("${rank}") != std::string::npos;
    } else if (wanted.prefix) {
        output.prefix = fmt::format("[rank {} {}] ", rank, program.name());
    }
    std::map<std::string, SharedFile> files;  // by name
    for (const Stream stream : both_streams) {
        const auto index = static_cast<size_t>(stream);
        output.shown[index] = wanted.shows(local_rank, stream);
        if (options_.log_directory.empty()) continue;
        const bool own = wanted.has_file(local_rank, stream);
        const std::string name = fmt::format("rank-{}{}.log", rank,
                                             !own                    ? ""
                                             : stream == Stream::out ? ".stdout"
                                                                     : ".stderr");
        if (!files.contains(name)) files[name] = open_log(name);
        output.files[index] = files[name];
        // In the end that of standard error, for the report.
        worker.log_file = fmt::format("{}/{}/{}", error_directory_, round_name(round_), name);
    }
    return output;
}

// An existing file is from an earlier job with the same directory.
SharedFile Agent::open_log(const std::string& name) {
    const int opened = round_directory_.replace_file(name, O_WRONLY | O_APPEND, 0644);
    if (opened < 0) {
        throw os_error(fmt::format("cannot open log file {}/{}/{}", error_directory_, round_name(round_), name),
                       -opened);
    }
    return std::make_shared<Fd>(opened);
}

std::vector<std::string> Agent::environment_of(int rank, const std::vector<RankIdentity>& members,
                                               const Worker& worker) const {
    const auto world = static_cast<int64_t>(members.size());
    Variables v;
    // Settings of an outer job or the shell would contradict those below.
    for (const char* name : {"TESSERA_TOKEN", "TESSERA_TOKEN_FILE", "TESSERA_TOKEN_FD", "TESSERA_STORE_PORT",
                             "TESSERA_STORE_BIND", "TESSERA_INSECURE"}) {
        v.erase(name);
    }
    // torchrun's. Programs for it, torch.distributed among them, run unchanged.
    for (const char* name : {"RANK", "LOCAL_RANK", "TESSERA_RANK", "TESSERA_LOCAL_RANK"}) v.set(name, rank);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "TESSERA_WORLD_SIZE", "TESSERA_LOCAL_WORLD_SIZE"}) {
        v.set(name, world);
    }
    v.set("GROUP_RANK", 0);
    v.set("GROUP_WORLD_SIZE", 1);
    v.set("MASTER_ADDR", "127.0.0.1");
    v.set("MASTER_PORT", master_port_->port());
    v.set("TORCHELASTIC_RESTART_COUNT", restarts_);
    v.set("TORCHELASTIC_MAX_RESTARTS", options_.max_restarts);
    v.set("TORCHELASTIC_RUN_ID", job_id_);
    v.set("TORCHELASTIC_USE_AGENT_STORE", "False");
    v.set("TORCHELASTIC_ERROR_FILE", worker.error_file);
    set_torchrun_variables(v, options_, members, rank, rank);
    if (world > 1) v.set_default("OMP_NUM_THREADS", "1");
    v.set_default("PYTHONUNBUFFERED", "1");  // keeps what a rank printed before it died
    // Tessera's own.
    v.set("TESSERA_STORE", store_->uri());
    v.set("TESSERA_JOB_ID", job_id_);
    v.set("TESSERA_EPOCH", round_);
    v.set("TESSERA_ERROR_FILE", worker.error_file);
    v.set("TESSERA_FAILURE_FILE", worker.failure_file);
    const pid_t self = ::getpid();
    v.set("TESSERA_PREEMPT_FD", page_.fd());
    v.set("TESSERA_PREEMPT_FILE", fmt::format("/proc/{}/fd/{}", self, page_.fd()));
    v.set("TESSERA_PREEMPT_ASKED_FD", page_.asked_fd());
    v.set("TESSERA_PREEMPT_ASKED_FILE", fmt::format("/proc/{}/fd/{}", self, page_.asked_fd()));
    if (options_.insecure) {
        v.set("TESSERA_INSECURE", "1");
    } else {
        v.set("TESSERA_TOKEN_FD", token_file_.get());
        v.set("TESSERA_TOKEN_FILE", fmt::format("/proc/{}/fd/{}", self, token_file_.get()));
    }
    if (options_.timeout) v.set("TESSERA_TIMEOUT_MS", options_.timeout->count());
    if (!options_.trace_directory.empty()) {
        v.set("TESSERA_TRACE_DIR", std::filesystem::absolute(trace_directory()).string());
    }
    for (const auto& [name, value] : options_.programs[static_cast<size_t>(worker.member.program)].environment) {
        v.set(name, value);
    }
    return v.entries();
}

// Waits for whatever comes first: output, a signal, the guardian's death, the stage's deadline.
void Agent::turn() {
    std::vector<pollfd> polls;
    polls.push_back({signals_.get(), POLLIN, 0});
    polls.push_back({guardian_died_ ? -1 : guardian_, POLLIN, 0});
    const size_t own = polls.size();
    logs_.append_polls(polls);
    const size_t of_logs = polls.size() - own;
    events_.append_polls(polls);
    if (::poll(polls.data(), polls.size(), timeout_ms()) < 0 && errno != EINTR) throw os_error("poll", errno);
    logs_.handle_polls(polls.data() + own, of_logs);
    events_.write_some();
    if (polls[1].revents != 0) {
        guardian_died_ = true;
        kill_workers();
    }
    take_signals();
    pass_deadline();
    renew_directory();
}

void Agent::take_signals() {
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
        const int signal = static_cast<int>(info.ssi_signo);
        if (std::ranges::find(options_.stop_signals, signal) != options_.stop_signals.end()) {
            asked_to_stop(signal);
        } else if (signal == SIGUSR1) {
            ask_for_flights();
        }
    }
    reap();  // one SIGCHLD may stand for many
}

void Agent::reap() {
    ++reap_turn_;
    int status = 0;
    bool any = false;
    for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
        for (size_t rank = 0; rank < workers_.size(); ++rank) {
            if (workers_[rank].pid != pid || workers_[rank].end) continue;
            note_exit(static_cast<int>(rank), status);
            any = true;
        }
    }
    if (failed_ && stage_ == Stage::running) {
        note_who_is_ending();
        stage_ = Stage::hearing;
        stage_deadline_ = Deadline::in(hearing_deadline);
    }
    if (any && !all_ended() && !is_ending()) tell_ranks_of_departures();
}

// A rank may be waiting for an ended rank to join; an end with exit code 0 is not a failure that ends the job.
void Agent::tell_ranks_of_departures() {
    std::vector<Departure> departures;
    for (size_t rank = 0; rank < workers_.size(); ++rank) {
        const auto& end = workers_[rank].end;
        if (end) departures.push_back(departure_of(static_cast<int>(rank), end->wait_status));
    }
    try {
        if (!own_client_) own_client_ = Store::open(store_->uri(), store_options());
        tell_departures(*own_client_, departures, Deadline::in(tell_deadline));
    } catch (const Error& error) {
        logs_.say(fmt::format("cannot tell the ranks which ranks have ended: {}", error.what()));
    }
}

void Agent::note_exit(int rank, int status) {
    Worker& worker = workers_[static_cast<size_t>(rank)];
    const double now = wall_time();
    Json::Object fields = {
        {"round", round_}, {"rank", rank}, {"pid", static_cast<int64_t>(worker.pid)}, {"host", host_}};
    if (WIFSIGNALED(status)) {
        fields.push_back({"signal", signal_name(WTERMSIG(status))});
    } else {
        fields.push_back({"code", WEXITSTATUS(status)});
    }
    // Once the agent stops the ranks, it causes how they end; but a signal that it never sends shows a rank that was
    // already dying (writing a core file takes time).
    const bool own_signal = WIFSIGNALED(status) && WTERMSIG(status) != SIGTERM && WTERMSIG(status) != SIGKILL;
    const bool own_exit = !WIFSIGNALED(status) && worker.ending_turn;
    const bool by_agent = is_ending() && !own_signal && !own_exit;
    const int turn = own_exit ? *worker.ending_turn : reap_turn_;
    fields.push_back({"ended_by_agent", by_agent});
    events_.write("exit", now, std::move(fields));
    worker.end = RankEnd{rank, host_, worker.pid, status, now, turn, by_agent, worker.log_file, std::nullopt, {}};
    if (survives_loss_of(worker)) {
        worker.end->survived = true;
        logs_.say(fmt::format("rank {} {}; {} may continue (--on-loss continue)", rank, describe_status(status),
                              plural(living(), "rank")));
        return;
    }
    failed_ = failed_ || (status != 0 && !by_agent);
}

int Agent::living() const {
    return static_cast<int>(std::ranges::count_if(workers_, [](const Worker& worker) { return !worker.end; }));
}

// A killed rank is a loss that the others may survive; a rank that fails on its own is an error of the program.
bool Agent::survives_loss_of(const Worker& worker) const {
    return options_.on_loss == OnLoss::go_on && stage_ == Stage::running && !worker.end->by_agent &&
           WIFSIGNALED(worker.end->wait_status) && living() >= options_.min_ranks;
}

// Each rank answers on its own, even one that hangs; a stopped or dead one writes no record.
void Agent::ask_for_flights() {
    try {
        if (flight_directory_.empty() || (options_.trace_directory.empty() && !is_own_directory(flight_directory_))) {
            flight_directory_ =
                options_.trace_directory.empty() ? temporary_directory("trace") : options_.trace_directory;
        }
        const std::string directory =
            std::filesystem::absolute(fmt::format("{}/{}", flight_directory_, round_name(round_))).string();
        (void)made_directory(flight_directory_, round_name(round_));
        page_.request_flights(directory);
        events_.write("trace", wall_time(), {{"round", round_}, {"directory", directory}});
        logs_.say(fmt::format(
            "SIGUSR1: the ranks write their flight records to {}; to see which rank the job waits for, run: "
            "tessera trace why-hung {}",
            directory, directory));
    } catch (const Error& error) {
        logs_.say(fmt::format("SIGUSR1: cannot request flight records: {}", error.what()));
    }
}

void Agent::asked_to_stop(int signal) {
    events_.write("stop", wall_time(), {{"signal", signal_name(signal)}});
    const bool again = stop_signal_ != 0;
    if (!again) stop_signal_ = signal;
    page_.request_preemption();
    if (again || signal == SIGQUIT) {
        logs_.say(fmt::format("{}: killing the ranks", signal_name(signal)));
        return kill_workers();
    }
    if (stage_ != Stage::running) return;
    grace_deadline_ = Deadline::in(options_.grace);
    const bool listening = pass_on(signal) > 0 || page_.somebody_listens();
    stage_ = listening ? Stage::saving : Stage::noticing;
    stage_deadline_ = listening ? grace_deadline_ : grace_deadline_.earlier(Deadline::in(notice_deadline));
    const std::string what =
        listening
            ? fmt::format("waiting up to {:g} s for the ranks to save and exit (--grace-s)", seconds(options_.grace))
            : fmt::format("no rank polls for preemption; stopping in {:.1g} s", seconds(stage_deadline_.remaining()));
    logs_.say(fmt::format("{}: {}; send a second signal (Ctrl-C) to kill the ranks now", signal_name(signal), what));
}

// Passes a scheduler's signal on to the ranks that have a handler for it; others would die of it. Returns how many have.
// The signals that end a program without a scheduler are not passed on: an interpreter may handle them in order to stop.
int Agent::pass_on(int signal) {
    if (signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGQUIT) return 0;
    int handling = 0;
    for (const Worker& worker : workers_) {
        if (worker.end || !process_handles(worker.pid, signal)) continue;
        ::kill(worker.pid, signal);
        ++handling;
    }
    return handling;
}

// Records which ranks are already exiting: peers notice a rank's end, and fail, before it can be reaped.
void Agent::note_who_is_ending() {
    if (is_ending()) return;
    for (Worker& worker : workers_) {
        if (worker.end || worker.ending_turn) continue;
        const auto stat = process_stat(worker.pid);
        if (stat && stat->ending) worker.ending_turn = reap_turn_;
    }
}

void Agent::end_workers() {
    note_who_is_ending();
    stage_ = Stage::ending;
    stage_deadline_ = Deadline::in(options_.kill_grace);
    signal_workers(SIGTERM);
}

void Agent::kill_workers() {
    note_who_is_ending();
    stage_ = Stage::killing;
    stage_deadline_ = Deadline::in(burial_deadline);
    signal_workers(SIGKILL);
}

// Signals the process groups; a group id is not reused before its leader, the rank, is reaped.
void Agent::signal_workers(int signal) {
    for (const Worker& worker : workers_) {
        if (worker.end) continue;
        ::kill(-worker.pid, signal);
        ::kill(worker.pid, signal);                          // in case it changed its group
        if (signal != SIGKILL) ::kill(worker.pid, SIGCONT);  // lets a stopped rank receive it
    }
}

void Agent::pass_deadline() {
    if (stage_ == Stage::running || !stage_deadline_.expired()) return;
    if (stage_ == Stage::noticing && page_.somebody_listens()) {
        stage_ = Stage::saving;
        stage_deadline_ = grace_deadline_;
        logs_.say(fmt::format("a rank now polls for preemption: waiting up to {:g} s for the ranks to save and exit",
                              seconds(options_.grace)));
        return;
    }
    if (stage_ == Stage::noticing || stage_ == Stage::hearing) return end_workers();
    if (stage_ == Stage::saving) {
        logs_.say("the time to save is over (--grace-s); stopping the ranks");
        return end_workers();
    }
    if (stage_ == Stage::ending) return kill_workers();
    std::string alive;
    for (size_t rank = 0; rank < workers_.size(); ++rank) {
        if (!workers_[rank].end)
            alive += fmt::format("{}rank {} (pid {})", alive.empty() ? "" : ", ", rank, workers_[rank].pid);
    }
    throw Error(Code::timeout, fmt::format("cannot kill {}: probably in an uninterruptible system call", alive));
}

int Agent::timeout_ms() const {
    const Deadline next = stage_ == Stage::running ? renewal_ : renewal_.earlier(stage_deadline_);
    return static_cast<int>(next.remaining().count());
}

// Often enough that no cleaner considers the job's directory abandoned.
void Agent::renew_directory() {
    if (!renewal_.expired()) return;
    renewal_ = Deadline::in(renewal_pause);
    if (own_directory_) own_directory_->renew();
}

bool Agent::all_ended() const {
    return std::ranges::all_of(workers_, [](const Worker& worker) { return worker.end.has_value(); });
}

void Agent::bury_round() {
    kill_all_children(Deadline::in(burial_deadline));
    logs_.drain(Deadline::in(drain_deadline));
}

Agent::Outcome Agent::outcome() const {
    Outcome outcome;
    for (const Worker& worker : workers_) {
        RankEnd& end = outcome.ends.emplace_back(*worker.end);
        end.error = read_error_file(worker.error_file);
        end.failure = read_error_file(worker.failure_file);
        end.last_lines = logs_.last_error_lines(end.rank);
        const std::string prefix = fmt::format("[rank{}]: ", end.rank);  // PyTorch's, before each line of a traceback
        for (std::string& line : end.last_lines) {
            if (line.starts_with(prefix)) line.erase(0, prefix.size());
        }
    }
    outcome.failures = failures_of(outcome.ends);
    // If other ranks failed later, a survived loss counts as a cause like any other.
    if (std::ranges::all_of(outcome.failures, &RankEnd::survived)) outcome.failures.clear();
    for (const RankEnd& failure : outcome.failures) {
        // Others may have failed because of the first one, but not a rank that was killed.
        const bool killed =
            !failure.by_agent && WIFSIGNALED(failure.wait_status) && WTERMSIG(failure.wait_status) == SIGKILL;
        if (killed || &failure == &outcome.failures.front()) outcome.lost.push_back(failure.rank);
    }
    return outcome;
}

}  // namespace tsr
