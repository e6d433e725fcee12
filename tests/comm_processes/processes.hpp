// Ranks as real processes: forked from the test, each with its own view of one file store; what a rank's body returns or
// throws comes back through a pipe as text. The test can kill or stop them. Everything is reaped in any case.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "patience.hpp"
#include "store/store.hpp"
#include "temporary_directory.hpp"

namespace tsr::testing {

struct Outcome {
    int status = -1;  // as waitpid tells
    std::string text;
    Clock::time_point ended;

    [[nodiscard]] bool well() const { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
};

class Processes {
   public:
    // A rank's body: what it says (one line at a time) can be waited for by the parent.
    using Say = std::function<void(const std::string&)>;
    using Body = std::function<void(int rank, const std::shared_ptr<Store>& store, const Say& say)>;

    Processes(int count, const Body& body) {
        for (int rank = 0; rank < count; ++rank) {
            int ends[2];
            if (::pipe(ends) != 0) throw std::runtime_error("pipe failed");
            const pid_t pid = ::fork();
            if (pid < 0) throw std::runtime_error("fork failed");
            if (pid == 0) {
                ::close(ends[0]);
                ::_exit(run(rank, ends[1], body));
            }
            ::close(ends[1]);
            ranks_.push_back({pid, ends[0], {}, false});
        }
    }
    ~Processes() {
        for (Rank& rank : ranks_) {
            if (!rank.reaped) {
                ::kill(rank.pid, SIGKILL);
                ::waitpid(rank.pid, nullptr, 0);
            }
            ::close(rank.pipe);
        }
    }
    Processes(const Processes&) = delete;
    Processes& operator=(const Processes&) = delete;

    [[nodiscard]] Store& store() {
        if (!store_) store_ = open_store();
        return *store_;
    }
    // Of the store.
    [[nodiscard]] const std::filesystem::path& directory() const { return directory_.path(); }
    [[nodiscard]] pid_t pid(int rank) const { return at(rank).pid; }
    void signal(int rank, int number) { ::kill(at(rank).pid, number); }

    // Waits until the rank has said `line`.
    void await(int rank, const std::string& line) {
        const auto deadline = Deadline::in(patience(milliseconds{30000}));
        while (at(rank).outcome.text.find(line + "\n") == std::string::npos) {
            if (deadline.expired()) throw std::runtime_error("rank " + std::to_string(rank) + " never said " + line);
            read_some(at(rank), milliseconds{50});
        }
    }

    // Waits until all have.
    void await_all(const std::string& line) {
        for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) await(rank, line);
    }

    // Waits for the rank to end; fails the test if it does not within `limit`.
    const Outcome& join(int rank, milliseconds limit = patience(milliseconds{30000})) {
        Rank& r = at(rank);
        const auto deadline = Deadline::in(limit);
        while (!r.reaped) {
            if (::waitpid(r.pid, &r.outcome.status, WNOHANG) == r.pid) {
                r.outcome.ended = Clock::now();
                r.reaped = true;
            }
            while (read_some(r, milliseconds{r.reaped ? 0 : 5})) {
            }
            if (!r.reaped && deadline.expired())
                throw std::runtime_error("rank " + std::to_string(rank) + " hangs: " + r.outcome.text);
        }
        return r.outcome;
    }

    void expect_all_well() {
        for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
            const Outcome& outcome = join(rank);
            EXPECT_TRUE(outcome.well()) << "rank " << rank << ": status " << outcome.status << ": " << outcome.text;
        }
    }

   private:
    struct Rank {
        pid_t pid;
        int pipe;
        Outcome outcome;
        bool reaped;
    };

    Rank& at(int rank) { return ranks_.at(static_cast<size_t>(rank)); }
    [[nodiscard]] const Rank& at(int rank) const { return ranks_.at(static_cast<size_t>(rank)); }

    bool read_some(Rank& rank, milliseconds limit) {
        pollfd entry{rank.pipe, POLLIN, 0};
        if (::poll(&entry, 1, static_cast<int>(limit.count())) <= 0) return false;
        char bytes[4096];
        const ssize_t n = ::read(rank.pipe, bytes, sizeof bytes);
        if (n > 0) rank.outcome.text.append(bytes, static_cast<size_t>(n));
        return n > 0;
    }

    [[nodiscard]] std::shared_ptr<Store> open_store() const {
        StoreOptions options;
        options.timeout = patience(milliseconds{30000});
        return Store::open("file://" + directory_.path().string(), options);
    }

    int run(int rank, int pipe, const Body& body) {
        const auto say = [pipe](const std::string& line) {
            const std::string text = line + "\n";
            if (::write(pipe, text.data(), text.size()) < 0) ::_exit(9);
        };
        try {
            const auto store = open_store();
            body(rank, store, say);
            return ::testing::Test::HasFailure() ? 2 : 0;
        } catch (const Error& e) {
            say(std::string(code_name(e.code())) + " peer " + std::to_string(e.record()->peer) + " " + e.what());
            return 1;
        } catch (const std::exception& e) {
            say(e.what());
            return 3;
        }
    }

    TemporaryDirectory directory_;
    std::shared_ptr<Store> store_;
    std::vector<Rank> ranks_;
};

}  // namespace tsr::testing
