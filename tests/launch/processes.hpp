// Helpers for tests that start processes: an environment of their own, children that are always reaped, directories
// that go with the test.
#pragma once

#include <fmt/format.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "patience.hpp"
#include "store/address.hpp"
#include "temporary_directory.hpp"

extern char** environ;

namespace tsr::testing {

inline bool of_a_launcher(std::string_view name) {
    if (name.starts_with("TESSERA_TEST_")) return false;
    for (const char* prefix : {"TESSERA_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "MPI_", "SLURM_",
                               "TORCHELASTIC_", "GROUP_", "ROLE_", "JOB_COMPLETION_", "XDG_RUNTIME_DIR"}) {
        if (name.starts_with(prefix)) return true;
    }
    return false;
}

// Replaces every variable that a launcher sets by those given, until the end of the scope.
class Environment {
   public:
    explicit Environment(const std::map<std::string, std::string>& variables) {
        for (char** entry = environ; *entry != nullptr; ++entry) {
            const std::string text = *entry;
            const size_t equals = text.find('=');
            if (of_a_launcher(text.substr(0, equals)))
                former_.emplace_back(text.substr(0, equals), text.substr(equals + 1));
        }
        for (const auto& [name, value] : former_) ::unsetenv(name.c_str());
        for (const auto& [name, value] : variables) {
            ::setenv(name.c_str(), value.c_str(), 1);
            own_.push_back(name);
        }
    }
    ~Environment() {
        for (const std::string& name : own_) ::unsetenv(name.c_str());
        for (const auto& [name, value] : former_) ::setenv(name.c_str(), value.c_str(), 1);
    }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;

   private:
    std::vector<std::pair<std::string, std::string>> former_;
    std::vector<std::string> own_;
};

// A process that is killed and reaped with the object, if it still runs.
class Child {
   public:
    explicit Child(pid_t pid) : pid_(pid) {}
    Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
    Child& operator=(Child&&) = delete;
    ~Child() {
        if (pid_ <= 0) return;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    [[nodiscard]] pid_t pid() const { return pid_; }
    // The exit code, or 128 + signal.
    [[nodiscard]] int wait(milliseconds limit = patience(milliseconds{60000})) {
        int status = 0;
        wait_until([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; }, Deadline::in(limit), "a child process");
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }

   private:
    pid_t pid_;
};

// Runs `body` in a forked process with that environment; exit code 0 unless it throws.
inline Child in_child(const std::map<std::string, std::string>& variables, const std::function<void()>& body) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid > 0) return Child(pid);
    int code = 0;
    try {
        const Environment environment(variables);
        body();
    } catch (...) {
        std::fprintf(stderr, "child %d: %s\n", ::getpid(), current_error().what());
        code = 1;
    }
    std::exit(code);  // with destructors of statics, as a rank ends
}

inline std::string read_file(const std::filesystem::path& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

// A port that was free a moment ago.
inline uint16_t free_port() {
    Address address{"127.0.0.1", 0};
    const Fd socket = listen_on(address);
    return address.port;
}

}  // namespace tsr::testing
