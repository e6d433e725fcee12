// The threads of this process that began after a moment, and whether they leave the program's signals to its own threads.
#pragma once

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "base/clock.hpp"
#include "soon.hpp"

namespace tsr::testing {

class NewThreads {
   public:
    NewThreads() : before_(now()) {}

    // One of them has this name, or gets it soon: a thread is named after it has begun. None of them takes signals.
    void expect_no_signals_taken(const std::string& name) const {
        wait_until([&] { return is_there(name); }, soon(), "a thread of that name");
        for (const std::string& thread : now()) {
            if (before_.contains(thread)) continue;
            const std::string status = text_of(thread, "status");
            const size_t mask = status.find("SigBlk:");
            // It has ended, or is about to: the kernel shows neither its masks nor how many threads it is one of.
            if (mask == std::string::npos || status.find("Threads:\t0\n") != std::string::npos) continue;
            const uint64_t blocked = std::stoull(status.substr(mask + 7), nullptr, 16);
            for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD, SIGPIPE}) {
                EXPECT_NE(blocked >> (signal - 1) & 1, 0U) << text_of(thread, "comm") << " takes signal " << signal;
            }
        }
    }

   private:
    static std::set<std::string> now() {
        std::set<std::string> threads;
        for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
            threads.insert(thread.path().filename().string());
        }
        return threads;
    }
    static std::string text_of(const std::string& thread, const char* what) {
        const std::ifstream file("/proc/self/task/" + thread + "/" + what);
        std::ostringstream text;
        text << file.rdbuf();  // nothing more of a thread that ends meanwhile, which is an error of the file
        return text.str();
    }
    [[nodiscard]] bool is_there(const std::string& name) const {
        for (const std::string& thread : now()) {
            if (!before_.contains(thread) && text_of(thread, "comm") == name + "\n") return true;
        }
        return false;
    }

    std::set<std::string> before_;
};

}  // namespace tsr::testing
