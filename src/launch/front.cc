#include "launch/front.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "launch/process.hpp"
#include "launch/variables.hpp"

namespace tsr {

namespace {

constexpr milliseconds farewell{3000};  // for the other agents to hear of a failure from each other
constexpr milliseconds death_deadline{10000};
constexpr int ssh_failed = 255;
constexpr std::string_view signal_word = "signal ";
constexpr size_t longest_line = 64;

// The signals that have come, without SIGCHLD.
std::vector<int> signals_in(const Fd& signals) {
    std::vector<int> come;
    signalfd_siginfo info{};
    while (::read(signals.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
        if (info.ssi_signo != SIGCHLD) come.push_back(static_cast<int>(info.ssi_signo));
    }
    return come;
}

void set_nonblocking(int fd) {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw os_error("fcntl", errno);
}

class Agents {
   public:
    Agents(const Front& front, const sigset_t& signal_mask) {
        for (const Front::Start& start : front.starts) {
            auto [input, writer] = make_pipe();
            set_nonblocking(writer.get());
            Spawn order;
            order.path = find_executable(start.start.command.front());
            order.arguments = start.start.command;
            order.environment = Variables().entries();
            order.input = input.get();
            order.output = STDOUT_FILENO;
            order.error = STDERR_FILENO;
            order.signal_mask = signal_mask;
            agents_.push_back({start.host, spawn(order), std::move(writer), start.start.input, std::nullopt});
        }
    }

    [[nodiscard]] bool all_ended() const { return std::ranges::all_of(agents_, &Agent::ended); }

    void append_polls(std::vector<pollfd>& polls) const {
        for (const Agent& agent : agents_) {
            if (agent.input.valid() && !agent.unsent.empty()) polls.push_back({agent.input.get(), POLLOUT, 0});
        }
    }

    void write_some() {
        for (Agent& agent : agents_) {
            while (agent.input.valid() && !agent.unsent.empty()) {
                const ssize_t sent = ::write(agent.input.get(), agent.unsent.data(), agent.unsent.size());
                if (sent > 0) {
                    agent.unsent.erase(0, static_cast<size_t>(sent));
                } else if (errno == EAGAIN) {
                    break;
                } else if (errno != EINTR) {
                    agent.input.reset();  // it has ended, which its exit code tells
                }
            }
        }
    }

    // Returns whether one of them failed.
    bool reap() {
        bool failed = false;
        int status = 0;
        for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
            const auto agent = std::ranges::find(agents_, pid, &Agent::pid);
            if (agent == agents_.end() || agent->code) continue;
            agent->code = exit_code_of(status);
            agent->input.reset();
            if (*agent->code != 0) {
                failed = true;
                if (first_failure_ == 0) first_failure_ = *agent->code;
            }
            if (*agent->code == ssh_failed) {
                fmt::print(
                    stderr,
                    "tessera: the agent on host {} ended with exit code 255, as ssh does if it cannot connect or "
                    "log in: try `ssh -o BatchMode=yes {} true`\n",
                    agent->host, agent->host);
            }
        }
        return failed;
    }

    void signal_one(int signal) {
        const auto living = std::ranges::find_if(agents_, [](const Agent& agent) { return agent.input.valid(); });
        if (living != agents_.end()) living->unsent += signal_line(signal);
    }
    void let_go() {
        for (Agent& agent : agents_) agent.input.reset();
    }

    [[nodiscard]] int exit_code() const { return first_failure_ == 0 && !all_ended() ? 1 : first_failure_; }

   private:
    struct Agent {
        std::string host;
        pid_t pid;
        Fd input;            // its standard input
        std::string unsent;  // for it
        std::optional<int> code;
        [[nodiscard]] bool ended() const { return code.has_value(); }
    };
    std::vector<Agent> agents_;
    int first_failure_ = 0;  // an exit code
};

}  // namespace

std::string signal_line(int signal) { return fmt::format("{}{}\n", signal_word, signal); }

int signal_in(std::string_view line) {
    if (!line.starts_with(signal_word)) return 0;
    line.remove_prefix(signal_word.size());
    int signal = 0;
    const auto [end, failure] = std::from_chars(line.data(), line.data() + line.size(), signal);
    return failure == std::errc{} && end == line.data() + line.size() && signal > 0 && signal < SIGRTMIN ? signal : 0;
}

int run_front(const Front& front, int guardian, const sigset_t& signal_mask) {
    std::vector<int> passed_on = front.stop_signals;
    passed_on.push_back(SIGUSR1);  // asks for flight records
    const Fd signals = signal_descriptor(passed_on);
    Agents agents(front, signal_mask);
    std::optional<Deadline> stop;  // then the others are asked to
    std::optional<Deadline> end;   // then they are killed
    const auto begin_end = [&] {
        if (!end) end = Deadline::in(front.patience);
    };
    while (!agents.all_ended()) {
        agents.write_some();
        std::vector<pollfd> polls{{signals.get(), POLLIN, 0}, {guardian, POLLIN, 0}};
        agents.append_polls(polls);
        int64_t wait = -1;
        for (const auto& deadline : {stop, end}) {
            if (deadline && (wait < 0 || deadline->remaining().count() < wait)) wait = deadline->remaining().count();
        }
        if (::poll(polls.data(), polls.size(), static_cast<int>(wait)) < 0 && errno != EINTR)
            throw os_error("poll", errno);
        if (polls[1].revents != 0) break;  // the guardian is gone
        for (const int signal : signals_in(signals)) {
            agents.signal_one(signal);
            if (std::ranges::find(front.stop_signals, signal) != front.stop_signals.end()) begin_end();
        }
        if (agents.reap() && !stop && !end) stop = Deadline::in(farewell);
        if (stop && stop->expired()) {
            stop.reset();
            begin_end();
            agents.let_go();
        }
        if (end && end->expired()) break;
    }
    const int code = agents.exit_code();
    kill_all_children(Deadline::in(death_deadline));
    return code;
}

int run_behind_front(const std::vector<std::string>& command) {
    const Fd signals = signal_descriptor({SIGTERM, SIGINT, SIGHUP, SIGQUIT});
    Spawn order;
    order.path = "/proc/self/exe";
    order.arguments = command;
    order.environment = Variables().entries();
    order.output = STDOUT_FILENO;
    order.error = STDERR_FILENO;
    sigemptyset(&order.signal_mask);
    const pid_t pid = spawn(order);
    bool is_open = true;
    std::string in;
    int status = 0;
    for (;;) {
        pollfd polls[] = {{signals.get(), POLLIN, 0}, {is_open ? STDIN_FILENO : -1, POLLIN, 0}};
        if (::poll(polls, std::size(polls), -1) < 0 && errno != EINTR) throw os_error("poll", errno);
        for (const int signal : signals_in(signals)) ::kill(pid, signal);
        if (::waitpid(pid, &status, WNOHANG) == pid) return exit_code_of(status);
        if (polls[1].revents == 0) continue;
        std::array<char, 256> bytes;
        const ssize_t got = ::read(STDIN_FILENO, bytes.data(), bytes.size());
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got <= 0) {  // who started this host has gone
            is_open = false;
            ::kill(pid, SIGTERM);
            continue;
        }
        in.append(bytes.data(), static_cast<size_t>(got));
        for (size_t end; (end = in.find('\n')) != std::string::npos; in.erase(0, end + 1)) {
            if (const int signal = signal_in(std::string_view(in).substr(0, end)); signal != 0) ::kill(pid, signal);
        }
        if (in.size() > longest_line) in.clear();
    }
}

}  // namespace tsr
