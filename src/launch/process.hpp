// Starts and ends processes so that none is left behind.
//
// The tree:  tessera run (guardian)  ->  agent  ->  rank, in its own session  ->  processes started by the rank
//
// Guardian and agent are subreapers: a process whose parent dies becomes a child of the agent, or of the guardian if
// the agent is gone, and so cannot get lost. Only own children are ever killed: their pids cannot be reused before they
// are reaped. The kernel sends SIGKILL to a rank when the agent dies. Agent and guardian have different names, so that
// killing by name does not hit both. The remaining gap: if both are killed by SIGKILL at the same instant, the ranks
// die, but processes started by ranks may survive.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"

namespace tsr {

// "SIGKILL", "SIGSEGV"; "signal 77" if it has no name.
[[nodiscard]] std::string signal_name(int signal);
// How a process ended: "ended with exit code 3", "was killed by SIGKILL".
[[nodiscard]] std::string describe_status(int wait_status);
// The exit code by shell conventions: the process's own, or 128 + signal.
[[nodiscard]] int exit_code_of(int wait_status);

// The exit code of a command that failed, by shell conventions: 2 for wrong usage, 126 if a program is not executable,
// 127 if it does not exist, else 1.
[[nodiscard]] int exit_code_of(const Error& error);

// The reading end and the writing end.
[[nodiscard]] std::pair<Fd, Fd> make_pipe();

// The file that `command` would execute, searched in PATH. Throws NOT_FOUND or PERMISSION.
[[nodiscard]] std::string find_executable(const std::string& command);

// Blocks SIGCHLD and `signals` in this thread; they are read from the descriptor, which does not block.
[[nodiscard]] Fd signal_descriptor(const std::vector<int>& signals);

// This process becomes the program at `path`. Throws IO, NOT_FOUND or PERMISSION if it cannot be executed.
[[noreturn]] void execute(const std::string& path, const std::vector<std::string>& arguments,
                          const std::vector<std::string>& environment);

struct Spawn {
    std::string path;
    std::vector<std::string> arguments;    // with argv[0]
    std::vector<std::string> environment;  // "K=V", complete
    int input = -1;                        // -1: /dev/null
    int output = -1;
    int error = -1;
    std::vector<int> inherited;   // descriptors that stay open under their numbers
    sigset_t signal_mask;         // the process starts with it
    rlim_t open_files = 0;        // its limit of open files; 0: this process's
    std::vector<int> processors;  // that it may run on; empty: this process's
};

// Starts a process in a new session; it is killed when this process dies. The calling thread must live as long as this
// process. Throws IO, NOT_FOUND or PERMISSION if the program cannot be executed.
[[nodiscard]] pid_t spawn(const Spawn& spawn);

// Kills and reaps all children, including adopted orphans, until there are none. Throws TIMEOUT naming those that
// cannot be killed (in an uninterruptible system call).
void kill_all_children(Deadline deadline);

// Raises this process's limit of open files to the maximum, for two pipes per rank. Returns the previous limit.
[[nodiscard]] rlim_t raise_open_files();

// Makes this process adopt orphaned descendants.
void become_subreaper();

// Runs `agent` in a child process with its own session and forwards SIGUSR1 and `stop_signals` to it, except SIGINT,
// SIGHUP and SIGQUIT where this process ignores them. Returns its exit code after all descendants are dead. `agent` gets a descriptor that becomes readable when the
// guardian dies, and the signal mask for its children. Must be called while the process has a single thread.
[[nodiscard]] int run_guarded(const std::function<int(int guardian, const sigset_t& signal_mask)>& agent,
                              const std::vector<int>& stop_signals = {SIGTERM, SIGINT, SIGHUP, SIGQUIT});

}  // namespace tsr
