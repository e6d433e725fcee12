#include "launch/process.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "base/proc.hpp"

namespace tsr {

namespace {

constexpr milliseconds death_deadline{10000};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
    std::vector<char*> out;
    for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
    out.push_back(nullptr);
    return out;
}

// The bits of an affinity mask as the kernel reads them.
std::vector<unsigned long> mask_of(const std::vector<int>& processors) {
    constexpr size_t bits = 8 * sizeof(unsigned long);
    std::vector<unsigned long> mask;
    for (const int id : processors) {
        const auto at = static_cast<size_t>(id);
        if (mask.size() <= at / bits) mask.resize(at / bits + 1);
        mask[at / bits] |= 1UL << at % bits;
    }
    return mask;
}

// After fork in a process with threads: only async-signal-safe calls, no allocation.
[[noreturn]] void become(const Spawn& spawn, char* const* arguments, char* const* environment,
                         const std::vector<unsigned long>& processors, pid_t parent, int report) {
    const auto give_up = [&] {
        const int failure = errno;
        (void)!::write(report, &failure, sizeof failure);
        ::_exit(127);
    };
    if (::setsid() < 0) give_up();
    if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) give_up();
    if (::getppid() != parent) ::_exit(127);  // it died before the line above
    if (::dup2(spawn.input, 0) < 0 || ::dup2(spawn.output, 1) < 0 || ::dup2(spawn.error, 2) < 0) give_up();
    for (const int fd : spawn.inherited) {
        if (::fcntl(fd, F_SETFD, 0) != 0) give_up();
    }
    if (rlimit limit{}; spawn.open_files != 0 && ::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = spawn.open_files;
        (void)::setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (!processors.empty()) {
        const auto* mask = reinterpret_cast<const cpu_set_t*>(processors.data());
        if (::sched_setaffinity(0, processors.size() * sizeof(unsigned long), mask) != 0) give_up();
    }
    for (int signal = 1; signal < NSIG; ++signal) {
        struct sigaction action{};
        action.sa_handler = SIG_DFL;
        (void)::sigaction(signal, &action, nullptr);  // fails for SIGKILL, SIGSTOP and the C library's own
    }
    if (::pthread_sigmask(SIG_SETMASK, &spawn.signal_mask, nullptr) != 0) give_up();
    ::execve(spawn.path.c_str(), arguments, environment);
    give_up();
    ::_exit(127);
}

std::vector<pid_t> children() {
    const pid_t self = ::getpid();
    std::vector<pid_t> found;
    const std::unique_ptr<DIR, int (*)(DIR*)> proc(::opendir("/proc"), &::closedir);
    if (!proc) throw os_error("cannot open /proc", errno);
    while (const dirent* entry = ::readdir(proc.get())) {
        const std::string_view name = entry->d_name;
        pid_t pid = 0;
        const auto [end, failure] = std::from_chars(name.data(), name.data() + name.size(), pid);
        if (failure != std::errc{} || end != name.data() + name.size()) continue;
        const auto stat = process_stat(pid);
        if (stat && stat->parent == self) found.push_back(pid);
    }
    return found;
}

// SIGCHLD, SIGUSR1 (requests flight records) and the signals that end the job, except those that this process ignores
// because of nohup or because it is a background job.
sigset_t guardian_signals(const std::vector<int>& stop_signals) {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGCHLD, SIGUSR1}) sigaddset(&set, signal);
    for (const int signal : stop_signals) {
        const bool may_be_ignored = signal == SIGINT || signal == SIGHUP || signal == SIGQUIT;
        struct sigaction action{};
        const bool ignored = ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
        if (!may_be_ignored || !ignored) sigaddset(&set, signal);
    }
    return set;
}

// Makes output without a reader, or beyond `ulimit -f`, an error of write() instead of the end of the job. Ranks start
// with the default.
void ignore_signals_of_writes() {
    struct sigaction ignore{};
    ignore.sa_handler = SIG_IGN;
    for (const int signal : {SIGPIPE, SIGXFSZ}) ::sigaction(signal, &ignore, nullptr);
}

// How to run a file that is not executable, judging by its name.
std::string way_to_start(std::string_view path) {
    constexpr std::pair<std::string_view, std::string_view> ways[] = {
        {".py", "python"}, {".sh", "sh"}, {".jar", "java -jar"}, {".jl", "julia"}};
    for (const auto& [suffix, program] : ways) {
        if (path.ends_with(suffix)) return fmt::format("run `{} {}`", program, path);
    }
    return "put its interpreter before it";
}

}  // namespace

std::string signal_name(int signal) {
    const char* name = ::sigabbrev_np(signal);
    return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

std::string describe_status(int wait_status) {
    if (WIFSIGNALED(wait_status)) return fmt::format("was killed by {}", signal_name(WTERMSIG(wait_status)));
    return fmt::format("ended with exit code {}", WEXITSTATUS(wait_status));
}

int exit_code_of(int wait_status) {
    return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

int exit_code_of(const Error& error) {
    switch (error.code()) {
        case Code::invalid_argument: return 2;
        case Code::permission: return 126;
        case Code::not_found: return 127;
        default: return 1;
    }
}

std::pair<Fd, Fd> make_pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw os_error("pipe", errno);
    return {Fd(ends[0]), Fd(ends[1])};
}

std::string find_executable(const std::string& command) {
    const auto check = [&](const std::string& path) -> int {
        struct stat info{};
        if (::stat(path.c_str(), &info) != 0) return errno;
        if (!S_ISREG(info.st_mode)) return EISDIR;
        return ::access(path.c_str(), X_OK) == 0 ? 0 : EACCES;
    };
    if (command.find('/') != std::string::npos) {
        const int failure = check(command);
        if (failure == 0) return command;
        if (failure == ENOENT) throw Error(Code::not_found, fmt::format("program '{}' does not exist", command));
        throw Error(Code::permission, fmt::format("cannot execute '{}': {}{}", command, std::strerror(failure),
                                                  failure == EACCES ? "; " + way_to_start(command) : ""));
    }
    const char* variable = std::getenv("PATH");
    std::string_view list = variable != nullptr ? variable : "/usr/local/bin:/usr/bin:/bin";
    bool forbidden = false;
    while (true) {
        const size_t colon = list.find(':');
        const std::string directory(list.substr(0, colon));
        const std::string path = fmt::format("{}/{}", directory.empty() ? "." : directory, command);
        const int failure = check(path);
        if (failure == 0) return path;
        forbidden |= failure == EACCES;
        if (colon == std::string_view::npos) break;
        list.remove_prefix(colon + 1);
    }
    if (forbidden) throw Error(Code::permission, fmt::format("'{}' is in PATH, but is not executable", command));
    const std::string here = check(command) == 0 ? fmt::format("; it is in the current directory: run ./{}", command)
                             : check(command) == EACCES
                                 ? "; a file with this name is in the current directory: " + way_to_start(command)
                                 : "";
    throw Error(Code::not_found, fmt::format("program '{}' is not in PATH{}", command, here));
}

pid_t spawn(const Spawn& spawn) {
    const std::vector<char*> arguments = pointers(spawn.arguments);
    const std::vector<char*> environment = pointers(spawn.environment);
    const std::vector<unsigned long> processors = mask_of(spawn.processors);
    auto [report_in, report_out] = make_pipe();
    Spawn ready = spawn;
    Fd null;
    if (ready.input < 0) {
        null = Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        if (!null.valid()) throw os_error("cannot open /dev/null", errno);
        ready.input = null.get();
    }
    const pid_t self = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) throw os_error(fmt::format("cannot start '{}'", spawn.path), errno);
    if (pid == 0) become(ready, arguments.data(), environment.data(), processors, self, report_out.get());
    report_out.reset();
    int failure = 0;
    ssize_t got = 0;
    do {
        got = ::read(report_in.get(), &failure, sizeof failure);  // ends when exec has closed the other side
    } while (got < 0 && errno == EINTR);
    if (got == 0) return pid;
    ::waitpid(pid, nullptr, 0);
    if (failure == ENOEXEC) {
        throw Error(Code::permission,
                    fmt::format("'{}' is neither a program for this machine nor a script that begins with "
                                "#! and its interpreter; {}",
                                spawn.path, way_to_start(spawn.path)));
    }
    throw os_error(fmt::format("cannot start '{}'", spawn.path), failure);
}

Fd signal_descriptor(const std::vector<int>& signals) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    for (const int signal : signals) sigaddset(&set, signal);
    if (const int error = ::pthread_sigmask(SIG_BLOCK, &set, nullptr)) throw os_error("pthread_sigmask", error);
    Fd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd.valid()) throw os_error("signalfd", errno);
    return fd;
}

void execute(const std::string& path, const std::vector<std::string>& arguments,
             const std::vector<std::string>& environment) {
    ::execve(path.c_str(), pointers(arguments).data(), pointers(environment).data());
    throw os_error(fmt::format("cannot execute {}", path), errno);
}

void kill_all_children(Deadline deadline) {
    for (;;) {
        // A killed child's own children become ours and are found in the next turn.
        for (const pid_t pid : children()) ::kill(pid, SIGKILL);
        const Deadline slice = Deadline::in(milliseconds{5});
        for (;;) {
            const pid_t pid = ::waitpid(-1, nullptr, WNOHANG);
            if (pid < 0 && errno == ECHILD) return;
            if (pid == 0) {
                if (slice.expired()) break;
                ::usleep(200);
            }
        }
        if (!deadline.expired()) continue;
        const std::vector<pid_t> alive = children();
        throw Error(Code::timeout, fmt::format("cannot kill processes {}: probably in uninterruptible system calls",
                                               fmt::join(alive, ", ")));
    }
}

rlim_t raise_open_files() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) throw os_error("getrlimit", errno);
    const rlim_t former = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &limit);  // on failure, only jobs of some hundred ranks fail, with an error
    return former;
}

void become_subreaper() {
    if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) throw os_error("prctl(PR_SET_CHILD_SUBREAPER)", errno);
}

int run_guarded(const std::function<int(int guardian, const sigset_t& signal_mask)>& agent,
                const std::vector<int>& stop_signals) {
    become_subreaper();
    ignore_signals_of_writes();
    const sigset_t signals = guardian_signals(stop_signals);
    sigset_t former;
    if (const int error = ::pthread_sigmask(SIG_BLOCK, &signals, &former)) throw os_error("pthread_sigmask", error);
    auto [alive_in, alive_out] = make_pipe();  // alive_out stays open only in the guardian, and closes with it
    const pid_t pid = ::fork();
    if (pid < 0) throw os_error("fork", errno);
    if (pid == 0) {
        alive_out.reset();
        ::setsid();  // the terminal's signals come through the guardian only, once
        // So do those of `pkill tessera`; `killall -9 tessera` does not hit the agent, which cleans up.
        ::prctl(PR_SET_NAME, "tsr-agent");
        int code = 1;
        try {
            become_subreaper();
            code = agent(alive_in.get(), former);
        } catch (...) {
            const Error error = current_error();
            fmt::print(stderr, "tessera: {}\n", error.what());
            code = exit_code_of(error);
        }
        std::fflush(nullptr);
        ::_exit(code);
    }
    alive_in.reset();
    int status = 0;
    for (;;) {
        siginfo_t info;
        const int signal = ::sigwaitinfo(&signals, &info);
        if (signal < 0) continue;
        if (signal != SIGCHLD) {
            ::kill(pid, signal);
            continue;
        }
        bool ended = false;
        int any = 0;
        for (pid_t child; (child = ::waitpid(-1, &any, WNOHANG)) > 0;) {
            if (child != pid) continue;
            ended = true;
            status = any;
        }
        if (ended) break;
    }
    kill_all_children(Deadline::in(death_deadline));
    if (WIFSIGNALED(status))
        fmt::print(stderr, "tessera: the launcher {}; its ranks were killed\n", describe_status(status));
    return exit_code_of(status);
}

}  // namespace tsr
