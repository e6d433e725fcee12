// Starting and ending processes so that none is left behind.
//
// The tree:  tessera run (guardian)  ->  agent  ->  rank, a session of its own  ->  whatever the rank starts
//
// Guardian and agent are subreapers: a process whose parent dies becomes the child of the agent, or of the guardian when
// the agent is gone, and so cannot get lost. Only own children are ever killed: their pids cannot be another's before
// they are reaped. A rank gets SIGKILL from the kernel when the agent dies. The agent has another name than the guardian, so
// that who kills by name does not hit both. What remains: if both are killed by SIGKILL in the same instant, ranks die, but
// processes that ranks had started may live on.
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
// What a shell would say: the exit code, or 128 + signal.
[[nodiscard]] int exit_code_of(int wait_status);

// For a command that could not do its work: 2 for wrong usage, 126 for what may not be executed, 127 for what is not
// there, else 1: a shell's conventions.
[[nodiscard]] int exit_code_of(const Error& error);

// The reading end and the writing end.
[[nodiscard]] std::pair<Fd, Fd> make_pipe();

// The file that execution of `command` would run, found in PATH; throws NOT_FOUND or PERMISSION.
[[nodiscard]] std::string find_executable(const std::string& command);

struct Spawn {
    std::string path;
    std::vector<std::string> arguments;    // with argv[0]
    std::vector<std::string> environment;  // "K=V", all of it
    int input = -1;                        // -1: /dev/null
    int output = -1;
    int error = -1;
    std::vector<int> inherited;  // descriptors that stay open under their numbers
    sigset_t signal_mask;        // the process starts with it
    rlim_t open_files = 0;       // its limit of open files; 0: this process's
};

// Starts a session of its own that dies with this process. The calling thread must live as long as this process.
// Throws IO, NOT_FOUND, PERMISSION if the program cannot be executed.
[[nodiscard]] pid_t spawn(const Spawn& spawn);

// Kills and reaps all children, and what became a child because its parent died, until there are none. Throws TIMEOUT
// naming those that will not die (in an uninterruptible system call).
void kill_all_children(Deadline deadline);

// Raises this process's limit of open files as far as it may: two pipes a rank. Returns the former limit.
[[nodiscard]] rlim_t raise_open_files();

// Makes this process adopt orphaned descendants.
void become_subreaper();

// Runs `agent` in a child that is in a session of its own, forwards SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 to it, and ends with
// its exit code, after all descendants are dead. `agent` gets a descriptor that becomes readable when the guardian dies,
// and the signal mask for its children. Must be called while the process has one thread.
[[nodiscard]] int run_guarded(const std::function<int(int guardian, const sigset_t& signal_mask)>& agent);

}  // namespace tsr
