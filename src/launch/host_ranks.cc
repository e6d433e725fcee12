#include "launch/host_ranks.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/proc.hpp"
#include "base/write_whole.hpp"
#include "launch/error_file.hpp"
#include "launch/variables.hpp"
#include "launch/worker_environment.hpp"

namespace tsr {

namespace {

constexpr milliseconds burial_deadline{10000};
constexpr milliseconds drain_deadline{2000};
constexpr milliseconds hearing_deadline{100};  // for ranks that waited for a failed rank to report it
constexpr milliseconds notice_deadline{3000};  // for a rank that is still starting
constexpr milliseconds renewal_pause{3600'000};

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

// An existing file is from an earlier job.
SharedFile new_log(const DirAt& directory, const std::string& name, const std::string& path) {
    const int opened = directory.replace_file(name, O_WRONLY | O_APPEND, 0644);
    if (opened < 0) throw os_error("cannot open log file " + path, -opened);
    return std::make_shared<Fd>(opened);
}

SharedFile opened_log(const std::string& path) {
    DirAt directory;
    std::string name;
    if (const int error = DirAt::open_parent(path, directory, name); error != 0) {
        throw os_error("cannot open log file " + path, -error);
    }
    return new_log(directory, name, path);
}

// The name of a file in the directory of its round.
std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

}  // namespace

HostRanks::HostRanks(const RunOptions& options, const std::string& host, const Token& token,
                     const sigset_t& signal_mask, LogMux& logs, EventLog& events)
    : options_(options),
      host_(host),
      signal_mask_(signal_mask),
      open_files_(raise_open_files()),
      token_file_(token_memory(token)),
      logs_(logs),
      events_(events) {
    if (options_.log_directory.empty()) own_directory_.emplace();
    error_directory_ = own_directory_ ? own_directory_->path() : options_.log_directory;
}

void HostRanks::start(HostRound round) {
    round_ = std::move(round);
    stage_ = Stage::running;
    told_of_listener_ = false;
    page_.begin_round();
    workers_.clear();
    meters_ = std::make_unique<MeterPages>(round_.order.seats.size());
    in_round_ = true;
    const std::string name = round_name(round_.order.round);
    round_directory_ = made_directory(error_directory_, name);
    if (!options_.trace_directory.empty()) (void)made_directory(options_.trace_directory, name);
    for (const Stream stream : both_streams) {
        const bool is_out = stream == Stream::out;
        const auto& texts = is_out ? options_.output.out_filters : options_.output.err_filters;
        if (!texts.empty()) {
            logs_.duplicate(stream, texts, open_log(is_out ? "filtered_stdout.log" : "filtered_stderr.log"));
        }
    }
    if (!options_.shared_processors.empty()) {
        processors_ = equal_shares(options_.shared_processors, static_cast<int>(round_.order.seats.size()));
    } else if (options_.bind != Bind::none) {
        processors_ = processors_of_ranks(options_.bind, read_topology("", allowed_processors()),
                                          static_cast<int>(round_.order.seats.size()),
                                          nodes_of_devices("", env_text("CUDA_VISIBLE_DEVICES")));
    }
    workers_.reserve(round_.order.seats.size());
    for (const Seat& seat : round_.order.seats) workers_.push_back(start_worker(seat, 0));
}

std::string HostRanks::trace_directory() const {
    return fmt::format("{}/{}", options_.trace_directory, round_name(round()));
}

// Of the files of a process: what it prints and how it fails is its own, not its successor's.
std::string HostRanks::file_stem(const Worker& worker) {
    const std::string stem = fmt::format("rank-{}", worker.seat.rank);
    return worker.replacement == 0 ? stem : fmt::format("{}-replacement-{}", stem, worker.replacement);
}

HostRanks::Worker HostRanks::start_worker(const Seat& seat, int replacement) {
    Worker worker;
    worker.seat = seat;
    worker.replacement = replacement;
    const int rank = seat.rank;
    const Program& program = options_.programs.at(static_cast<size_t>(seat.program));
    const std::string stem = fmt::format("{}/{}/{}", error_directory_, round_name(round()), file_stem(worker));
    worker.error_file = stem + ".error.json";
    worker.failure_file = stem + ".failure.json";
    const int local_rank = rank - round_.order.seats.front().rank;
    RankOutput output = open_output(local_rank, worker);
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
    order.environment = environment_of(worker);
    order.input = rank == 0 ? STDIN_FILENO : -1;  // as mpirun does: one reader
    order.output = out_write.get();
    order.error = err_write.get();
    order.inherited = {page_.fd(), page_.asked_fd(), meters_->fd()};
    if (!options_.insecure) order.inherited.push_back(token_file_.get());
    order.signal_mask = signal_mask_;
    order.open_files = open_files_;
    worker.pid = spawn(order);
    logs_.add_rank(rank, std::move(out_read), std::move(err_read), std::move(output));
    events_.write("start", wall_time(),
                  {{"round", round()},
                   {"rank", rank},
                   {"pid", static_cast<int64_t>(worker.pid)},
                   {"host", host_},
                   {"program", program.name()},
                   {"world_size", static_cast<int64_t>(round_.order.world_size)}});
    return worker;
}

std::optional<RankEnd> HostRanks::replace(int rank) {
    const auto dead = std::ranges::find_if(
        workers_, [&](const Worker& worker) { return worker.seat.rank == rank && worker.end.has_value(); });
    if (dead == workers_.end()) {
        throw Error(Code::corrupt, fmt::format("the coordinating agent replaces rank {}, which is not dead", rank));
    }
    if (stage_ != Stage::running) return std::nullopt;
    RankEnd former = with_what_it_left(*dead);
    meters_->clear(static_cast<size_t>(dead - workers_.begin()));
    *dead = start_worker(dead->seat, dead->replacement + 1);
    return former;
}

// A stream that --redirects or --tee names has its own file; others share the rank's log, if a directory is named.
RankOutput HostRanks::open_output(int local_rank, Worker& worker) {
    const int rank = worker.seat.rank;
    const Program& program = options_.programs.at(static_cast<size_t>(worker.seat.program));
    const OutputOptions& wanted = options_.output;
    const RankNames names{rank, local_rank, program.role, host_};
    RankOutput output;
    if (!wanted.file_template.empty()) {
        worker.log_file = expand_prefix(wanted.file_template, names);
        output.files.fill(opened_log(worker.log_file));
        output.shown.fill(false);
        return output;
    }
    if (!wanted.prefix_template.empty()) {
        output.prefix = expand_prefix(wanted.prefix_template, names);
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
        const std::string name = fmt::format("{}{}.log", file_stem(worker),
                                             !own                    ? ""
                                             : stream == Stream::out ? ".stdout"
                                                                     : ".stderr");
        if (!files.contains(name)) files[name] = open_log(name);
        output.files[index] = files[name];
        // In the end that of standard error, for the report.
        worker.log_file = fmt::format("{}/{}/{}", error_directory_, round_name(round()), name);
    }
    return output;
}

SharedFile HostRanks::open_log(const std::string& name) {
    return new_log(round_directory_, name, fmt::format("{}/{}/{}", error_directory_, round_name(round()), name));
}

std::vector<std::string> HostRanks::environment_of(const Worker& worker) const {
    const StartRound& order = round_.order;
    const int rank = worker.seat.rank;
    const auto world = static_cast<int64_t>(order.world_size);
    const int local_rank = rank - order.seats.front().rank;
    const auto local_world = static_cast<int64_t>(order.seats.size());
    Variables v;
    // Settings of an outer job or the shell would contradict those below.
    for (const char* name : {"TESSERA_TOKEN", "TESSERA_TOKEN_FILE", "TESSERA_TOKEN_FD", "TESSERA_STORE_PORT",
                             "TESSERA_STORE_BIND", "TESSERA_INSECURE", "TESSERA_REPLACEMENT"}) {
        v.erase(name);
    }
    // torchrun's. Programs for it, torch.distributed among them, run unchanged.
    for (const char* name : {"RANK", "TESSERA_RANK"}) v.set(name, rank);
    for (const char* name : {"LOCAL_RANK", "TESSERA_LOCAL_RANK"}) v.set(name, local_rank);
    for (const char* name : {"WORLD_SIZE", "TESSERA_WORLD_SIZE"}) v.set(name, world);
    for (const char* name : {"LOCAL_WORLD_SIZE", "TESSERA_LOCAL_WORLD_SIZE"}) v.set(name, local_world);
    v.set("GROUP_RANK", order.group_rank);
    v.set("GROUP_WORLD_SIZE", order.group_size);
    v.set("MASTER_ADDR", order.master_address);
    v.set("MASTER_PORT", order.master_port);
    v.set("TORCHELASTIC_RESTART_COUNT", order.restarts);
    v.set("TORCHELASTIC_MAX_RESTARTS", options_.max_restarts);
    v.set("TORCHELASTIC_RUN_ID", round_.run_id);
    v.set("TORCHELASTIC_USE_AGENT_STORE", "False");
    v.set("TORCHELASTIC_ERROR_FILE", worker.error_file);
    set_torchrun_variables(v, options_, worker.seat, local_rank);
    if (local_world > 1) v.set_default("OMP_NUM_THREADS", "1");
    v.set_default("PYTHONUNBUFFERED", "1");  // keeps what a rank printed before it died
    // Tessera's own.
    v.set("TESSERA_STORE", round_.store_uri);
    v.set("TESSERA_JOB_ID", round_.job_id);
    v.set("TESSERA_EPOCH", round());
    if (options_.on_loss == OnLoss::replace) v.set("TESSERA_REPLACEMENT", worker.replacement);
    v.set("TESSERA_ERROR_FILE", worker.error_file);
    v.set("TESSERA_FAILURE_FILE", worker.failure_file);
    const pid_t self = ::getpid();
    v.set("TESSERA_PREEMPT_FD", page_.fd());
    v.set("TESSERA_PREEMPT_FILE", fmt::format("/proc/{}/fd/{}", self, page_.fd()));
    v.set("TESSERA_PREEMPT_ASKED_FD", page_.asked_fd());
    v.set("TESSERA_PREEMPT_ASKED_FILE", fmt::format("/proc/{}/fd/{}", self, page_.asked_fd()));
    v.set("TESSERA_METER_FD", meters_->fd());
    v.set("TESSERA_METER_FILE", fmt::format("/proc/{}/fd/{}", self, meters_->fd()));
    v.set("TESSERA_METER_PAGES", static_cast<int64_t>(meters_->size()));
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
    for (const auto& [name, value] : options_.programs[static_cast<size_t>(worker.seat.program)].environment) {
        v.set(name, value);
    }
    return v.entries();
}

std::vector<RankEnd> HostRanks::reap() {
    ++reap_turn_;
    std::vector<RankEnd> ends;
    siginfo_t info{};
    while (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
        const auto worker =
            std::ranges::find_if(workers_, [&](const Worker& known) { return known.pid == info.si_pid && !known.end; });
        // What a dead rank started must not work beside its successor. Its group's number is its own until it is reaped.
        if (worker != workers_.end() && info.si_code != CLD_EXITED && options_.on_loss == OnLoss::replace) {
            ::kill(-info.si_pid, SIGKILL);
        }
        int status = 0;
        if (::waitpid(info.si_pid, &status, WNOHANG) != info.si_pid) break;
        if (worker != workers_.end()) {
            note_exit(*worker, status);
            ends.push_back(*worker->end);
        }
        info = {};
    }
    return ends;
}

void HostRanks::hear() {
    if (stage_ != Stage::running) return;
    note_who_is_ending();
    stage_ = Stage::hearing;
    stage_deadline_ = Deadline::in(hearing_deadline);
}

void HostRanks::note_exit(Worker& worker, int status) {
    const int rank = worker.seat.rank;
    const double now = wall_time();
    Json::Object fields = {
        {"round", round()}, {"rank", rank}, {"pid", static_cast<int64_t>(worker.pid)}, {"host", host_}};
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
}

// Each rank answers on its own, even one that hangs; a stopped or dead one writes no record.
void HostRanks::write_flights() {
    try {
        if (flight_directory_.empty() || (options_.trace_directory.empty() && !is_own_directory(flight_directory_))) {
            flight_directory_ =
                options_.trace_directory.empty() ? temporary_directory("trace") : options_.trace_directory;
        }
        const std::string directory =
            std::filesystem::absolute(fmt::format("{}/{}", flight_directory_, round_name(round()))).string();
        (void)made_directory(flight_directory_, round_name(round()));
        page_.request_flights(directory);
        events_.write("trace", wall_time(), {{"round", round()}, {"directory", directory}});
        logs_.say(fmt::format(
            "SIGUSR1: the ranks write their flight records to {}; to see which rank the job waits for, run: "
            "tessera trace why-hung {}",
            directory, directory));
    } catch (const Error& error) {
        logs_.say(fmt::format("SIGUSR1: cannot request flight records: {}", error.what()));
    }
}

void HostRanks::stop(int signal) {
    events_.write("stop", wall_time(), {{"signal", signal_name(signal)}});
    const bool again = stop_signal_ != 0;
    if (!again) stop_signal_ = signal;
    page_.request_preemption();
    if (again || signal == SIGQUIT) {
        logs_.say(fmt::format("{}: killing the ranks", signal_name(signal)));
        return kill_workers();
    }
    if (stage_ != Stage::running) return;
    ask_to_save(pass_on(signal) > 0 || somebody_listens(), signal_name(signal),
                "; send a second signal (Ctrl-C) to kill the ranks now");
}

void HostRanks::change() {
    if (stage_ != Stage::running) return;
    page_.request_preemption();
    ask_to_save(somebody_listens(), "a new round", "");
}

// Passes a scheduler's signal on to the ranks that have a handler for it; others would die of it. Returns how many have.
// The signals that end a program without a scheduler are not passed on: an interpreter may handle them in order to stop.
int HostRanks::pass_on(int signal) {
    if (signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGQUIT) return 0;
    int handling = 0;
    for (const Worker& worker : workers_) {
        if (worker.end || !process_handles(worker.pid, signal)) continue;
        ::kill(worker.pid, signal);
        ++handling;
    }
    return handling;
}

void HostRanks::ask_to_save(bool listening, const std::string& who, const std::string& then) {
    grace_deadline_ = Deadline::in(options_.grace);
    stage_ = listening ? Stage::saving : Stage::noticing;
    stage_deadline_ = listening ? grace_deadline_ : grace_deadline_.earlier(Deadline::in(notice_deadline));
    const std::string what =
        listening
            ? fmt::format("waiting up to {:g} s for the ranks to save and exit (--grace-s)", seconds(options_.grace))
            : fmt::format("no rank polls for preemption; stopping in {:.1g} s", seconds(stage_deadline_.remaining()));
    logs_.say(fmt::format("{}: {}{}", who, what, then));
}

void HostRanks::kill() {
    if (in_round_) kill_workers();
}

// Records which ranks are already exiting: peers notice a rank's end, and fail, before it can be reaped.
void HostRanks::note_who_is_ending() {
    if (is_ending()) return;
    for (Worker& worker : workers_) {
        if (worker.end || worker.ending_turn) continue;
        const auto stat = process_stat(worker.pid);
        if (stat && stat->ending) worker.ending_turn = reap_turn_;
    }
}

void HostRanks::end_workers() {
    note_who_is_ending();
    stage_ = Stage::ending;
    stage_deadline_ = Deadline::in(options_.kill_grace);
    signal_workers(SIGTERM);
}

void HostRanks::kill_workers() {
    note_who_is_ending();
    stage_ = Stage::killing;
    stage_deadline_ = Deadline::in(burial_deadline);
    signal_workers(SIGKILL);
}

// Signals the process groups; a group id is not reused before its leader, the rank, is reaped.
void HostRanks::signal_workers(int signal) {
    for (const Worker& worker : workers_) {
        if (worker.end) continue;
        ::kill(-worker.pid, signal);
        ::kill(worker.pid, signal);                          // in case it changed its group
        if (signal != SIGKILL) ::kill(worker.pid, SIGCONT);  // lets a stopped rank receive it
    }
}

void HostRanks::pass_deadline() {
    if (!in_round_ || stage_ == Stage::running || !stage_deadline_.expired()) return;
    if (stage_ == Stage::noticing && somebody_listens()) {
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
    for (const Worker& worker : workers_) {
        if (!worker.end)
            alive += fmt::format("{}rank {} (pid {})", alive.empty() ? "" : ", ", worker.seat.rank, worker.pid);
    }
    throw Error(Code::timeout, fmt::format("cannot kill {}: probably in an uninterruptible system call", alive));
}

Deadline HostRanks::next_deadline() const {
    return !in_round_ || stage_ == Stage::running ? renewal_ : renewal_.earlier(stage_deadline_);
}

// Often enough that no cleaner considers the job's directory abandoned.
void HostRanks::renew_directory() {
    if (!renewal_.expired()) return;
    renewal_ = Deadline::in(renewal_pause);
    if (own_directory_) own_directory_->renew();
}

std::vector<RankStatus> HostRanks::status() const {
    std::vector<RankStatus> ranks;
    for (size_t i = 0; i < workers_.size(); ++i) {
        const Worker& worker = workers_[i];
        RankStatus& rank = ranks.emplace_back();
        rank.rank = worker.seat.rank;
        rank.host = host_;
        rank.program = options_.programs[static_cast<size_t>(worker.seat.program)].name();
        rank.pid = worker.pid;
        if (worker.end) rank.state = state_of(*worker.end);
        rank.figures = meters_->read(i);
    }
    return ranks;
}

// Until the coordinator has replaced it or ends the round.
bool HostRanks::may_be_replaced(int wait_status) const {
    return options_.on_loss == OnLoss::replace && stage_ == Stage::running && WIFSIGNALED(wait_status);
}

bool HostRanks::all_ended() const {
    return std::ranges::all_of(
        workers_, [&](const Worker& worker) { return worker.end && !may_be_replaced(worker.end->wait_status); });
}

RankEnd HostRanks::with_what_it_left(const Worker& worker) const {
    RankEnd end = *worker.end;
    end.error = read_error_file(worker.error_file);
    end.failure = read_error_file(worker.failure_file);
    end.last_lines = logs_.last_error_lines(end.rank);
    const std::string prefix = fmt::format("[rank{}]: ", end.rank);  // PyTorch's, before each line of a traceback
    for (std::string& line : end.last_lines) {
        if (line.starts_with(prefix)) line.erase(0, prefix.size());
    }
    return end;
}

std::vector<RankEnd> HostRanks::bury() {
    kill_all_children(Deadline::in(burial_deadline));
    logs_.drain(Deadline::in(drain_deadline));
    in_round_ = false;
    std::vector<RankEnd> ends;
    for (const Worker& worker : workers_) {
        if (worker.end) ends.push_back(with_what_it_left(worker));  // none in a round that was not started to its end
    }
    return ends;
}

}  // namespace tsr
