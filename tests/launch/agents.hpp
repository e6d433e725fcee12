// Agents of one job, each with output of its own: `tessera run` once for each host.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "launch/run_fixture.hpp"

namespace tsr::testing {

class Agents : public Run {
   protected:
    Agents() : port_(free_port()) {}

    // Starts `tessera run OPTIONS... --rdzv-endpoint ENDPOINT COMMAND...` as host `name`; `enter` runs in its process
    // first.
    Child start_on(const std::string& name, std::vector<std::string> options, const std::vector<std::string>& command,
                   const std::function<void()>& enter = {}, const std::string& token = std::string(64, 'a')) {
        options.insert(options.begin(), {tessera, "run"});
        options.insert(options.end(),
                       {"--rdzv-endpoint", endpoint_.empty() ? "127.0.0.1:" + std::to_string(port_) : endpoint_});
        options.insert(options.end(), command.begin(), command.end());
        std::fflush(nullptr);
        const pid_t pid = ::fork();
        if (pid < 0) throw std::runtime_error("fork failed");
        if (pid > 0) return Child(pid);
        try {
            if (enter) enter();
        } catch (...) {
            ::_exit(125);
        }
        ::setenv("D", scratch().c_str(), 1);
        ::setenv("TMPDIR", directory_.path().c_str(), 1);
        ::setenv("HOST", name.c_str(), 1);
        ::setenv("TESSERA_HOST_ID", name.c_str(), 1);
        if (!token.empty()) ::setenv("TESSERA_TOKEN", token.c_str(), 1);
        const std::string path = output_of(name);
        const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
        if (file < 0 || ::dup2(file, 1) < 0 || ::dup2(file, 2) < 0) ::_exit(127);
        std::vector<char*> argv;
        for (std::string& argument : options) argv.push_back(argument.data());
        argv.push_back(nullptr);
        ::execv(argv[0], argv.data());
        ::_exit(126);
    }
    [[nodiscard]] std::string output_of(const std::string& name) const {
        return (directory_.path() / ("out-" + name)).string();
    }
    // Both streams.
    [[nodiscard]] std::string said(const std::string& name) const { return read_file(output_of(name)); }

    void await_said(const std::string& name, const std::string& part) const {
        wait_until([&] { return said(name).find(part) != std::string::npos; }, soon(), part.c_str());
    }
    // The pids of the ranks of tests/launch/programs/meets.c once all of them have met in that epoch.
    [[nodiscard]] std::vector<pid_t> await_met(int epoch, int world_size) const {
        std::vector<pid_t> pids;
        for (int rank = 0; rank < world_size; ++rank) {
            pids.push_back(pid_in(fmt::format("met-{}-of-{}-{}", epoch, world_size, rank)));
        }
        return pids;
    }
    void let_go() const { std::ofstream(scratch() + "/go") << "\n"; }
    // Any command of a process that `pid` started.
    static pid_t child_of(pid_t pid) {
        pid_t found = 0;
        wait_until(
            [&] {
                std::istringstream list(read_file(fmt::format("/proc/{0}/task/{0}/children", pid)));
                return static_cast<bool>(list >> found);
            },
            soon(), "a child");
        return found;
    }

    const std::string meets_ = binary_dir() + "/tests/meets";
    uint16_t port_;
    std::string endpoint_;  // empty: on loopback
};

}  // namespace tsr::testing
