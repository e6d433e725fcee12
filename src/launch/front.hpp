// The agents of a job that one command starts on several hosts: a process here for each, an ssh or the agent itself. It
// writes the agent's order (ssh.hpp) and then signals to the process's standard input, whose end asks the agent to stop.
#pragma once

#include <signal.h>

#include <string>
#include <vector>

#include "base/clock.hpp"
#include "launch/hosts/ssh.hpp"

namespace tsr {

struct Front {
    struct Start {
        std::string host;
        SshStart start;
    };
    std::vector<Start> starts;  // by node rank
    std::vector<int> stop_signals{SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    milliseconds patience{60000};  // from the first failure or signal until whatever still runs is killed
};

// Starts all of them and returns when all have ended. A signal goes to one agent, since each tells the whole job. When one
// fails, the others are asked to stop, unless they end by themselves. Returns the exit code of the agent that failed first,
// or 0. For run_guarded().
[[nodiscard]] int run_front(const Front& front, int guardian, const sigset_t& signal_mask);

// The other end, in the process that ssh started: runs `command` and does what is written to standard input. Returns the
// command's exit code.
[[nodiscard]] int run_behind_front(const std::vector<std::string>& command);

// A line that asks for a signal, and what reads it; 0: not such a line.
[[nodiscard]] std::string signal_line(int signal);
[[nodiscard]] int signal_in(std::string_view line);

}  // namespace tsr
