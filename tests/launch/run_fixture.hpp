// `tessera run` as a user meets it: the built command, small shell programs as ranks.
#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/json.hpp"
#include "base/proc.hpp"
#include "places.hpp"
#include "processes.hpp"
#include "soon.hpp"

namespace tsr::testing {

inline const std::string tessera = tsr::testing::binary_dir() + "/tessera";

struct Result {
    int code = -1;
    std::string out;
    std::string err;
};

inline std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

// Until its last thread has ended a process holds its files and locks, even if its first thread is a zombie already.
inline bool alive(pid_t pid) {
    const auto found = process_stat(pid);
    return found && !found->dead();
}

class Run : public ::testing::Test {
   protected:
    Run() { std::filesystem::create_directory(scratch()); }

    // Every rank leaves evidence here: $D.
    [[nodiscard]] std::string scratch() const { return (directory_.path() / "d").string(); }

    // Starts `tessera run ARGUMENTS`; its output goes to files.
    Child start(std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), {tessera, "run"});
        std::fflush(nullptr);
        const pid_t pid = ::fork();
        if (pid < 0) throw std::runtime_error("fork failed");
        if (pid > 0) return Child(pid);
        ::setenv("D", scratch().c_str(), 1);
        ::setenv("TMPDIR", directory_.path().c_str(), 1);
        for (const auto& [name, fd] : {std::pair{"out", 1}, {"err", 2}}) {
            const int file = ::open((directory_.path() / name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
            if (file < 0 || ::dup2(file, fd) < 0) ::_exit(127);
            ::close(file);
        }
        std::vector<char*> argv;
        for (std::string& argument : arguments) argv.push_back(argument.data());
        argv.push_back(nullptr);
        ::execv(argv[0], argv.data());
        ::_exit(126);
    }
    Result finish(Child& child) {
        Result result;
        result.code = child.wait();
        result.out = read_file(directory_.path() / "out");
        result.err = read_file(directory_.path() / "err");
        return result;
    }
    Result run(const std::vector<std::string>& arguments) {
        Child child = start(arguments);
        Result result = finish(child);
        EXPECT_EQ(leftover_directories(), 0) << "a temporary directory was left";
        return result;
    }
    // A shell program for all ranks.
    Result run_shell(std::vector<std::string> options, const std::string& script) {
        options.insert(options.end(), {"/bin/sh", "-c", script});
        return run(options);
    }

    [[nodiscard]] int leftover_directories() const {
        int count = 0;
        for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
            if (entry.path().filename().string().starts_with("tessera-run")) ++count;
        }
        return count;
    }
    [[nodiscard]] std::string file(const std::string& name) const { return read_file(scratch() + "/" + name); }
    [[nodiscard]] pid_t pid_in(const std::string& name) const {
        const std::string path = scratch() + "/" + name;
        wait_until([&] { return !read_file(path).empty() && read_file(path).back() == '\n'; }, soon(), path.c_str());
        return static_cast<pid_t>(std::stol(read_file(path)));
    }
    static void expect_dies(pid_t pid) {
        EXPECT_NO_THROW(wait_until([&] { return !alive(pid); }, soon(), "death")) << pid;
    }
    // The events as parsed lines.
    std::vector<Json> events() const {
        std::vector<Json> parsed;
        for (const std::string& line : lines_of(read_file(directory_.path() / "events"))) {
            parsed.push_back(Json::parse(line, "event"));
        }
        return parsed;
    }
    [[nodiscard]] std::string events_path() const { return (directory_.path() / "events").string(); }

    TemporaryDirectory directory_;
};

}  // namespace tsr::testing
