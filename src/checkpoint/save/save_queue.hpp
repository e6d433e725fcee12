// The background saves of a saver: one runs on the queue's own thread, later ones wait in order. Used by the saver's
// thread. Saves are numbered from 1, equally on every rank.
//
// A program that exits (by exit or return from main) before the queue is destroyed waits for its saves, unless they
// still need something of the program: its callbacks, its log function and memory lent by a state may be gone by then.
// Saves that are not waited for, or not done within the patience, are reported on standard error.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "comm/work.hpp"

namespace tsr {

// The caller's handle of a save in flight; done when the save has ended.
class SaveWork final : public Work {
   public:
    // Done when the whole state has been copied; if that never happens, together with the save and with its error.
    [[nodiscard]] const WorkPtr& staged() const { return staged_; }
    void end(const std::optional<Error>& error) {
        staged_->finish(error);
        finish(error);
    }

   private:
    WorkPtr staged_ = std::make_shared<Work>();
};

class SaveQueue {
   public:
    struct Save {
        int64_t step = 0;
        std::function<void()> run;  // throws if the save fails
        std::shared_ptr<SaveWork> work = std::make_shared<SaveWork>();
        uint64_t number = 0;   // set by push
        bool at_once = false;  // set by push: the queue was empty
    };
    using SavePtr = std::shared_ptr<Save>;

    struct Owner {
        std::string root;               // for messages
        bool calls_program = false;     // a save calls functions of the program
        milliseconds patience{600000};  // how long the program's exit waits
    };

    // `begin` is called first on the queue's thread.
    SaveQueue(std::function<void()> begin, Owner owner);
    // Waits for the queued saves; in a completion callback of a save, aborts them instead (ABORTED).
    ~SaveQueue();
    SaveQueue(const SaveQueue&) = delete;
    SaveQueue& operator=(const SaveQueue&) = delete;

    // Starts the thread if it does not run yet. False if the system cannot create one.
    bool start();
    void push(SavePtr save);  // without a thread the save runs before this returns
    // Takes back the last save if it still waits behind another one; nullptr if there is none.
    [[nodiscard]] SavePtr withdraw();
    void put_back(SavePtr save);  // the result of withdraw()

    [[nodiscard]] bool idle() const;
    // The number up to which all saves have ended.
    [[nodiscard]] uint64_t ended() const;
    // Returns when the queue is idle and every work is done. Throws only INTERRUPTED.
    void wait() const;
    // The first unreported failure of the saves up to `number`. All failures up to it then count as reported.
    [[nodiscard]] std::optional<Error> failure(uint64_t number);
    // Whether the caller is the thread of the queue.
    [[nodiscard]] bool is_own_thread() const;
    // In a callback of the running save: keeps `owner` alive until that save has ended. Elsewhere returns false.
    bool keep_while_running(std::shared_ptr<const void> owner);

   private:
    // Shared with the thread, which outlives a queue that is destroyed in a callback.
    struct State {
        mutable std::mutex mutex;
        mutable std::condition_variable changed;
        std::deque<SavePtr> waiting;  // all below are guarded by mutex
        SavePtr running;
        uint64_t ended = 0;
        WorkPtr last;                                      // of the save that ended last: done a moment later
        std::vector<std::pair<uint64_t, Error>> failures;  // not yet reported
        bool closed = false;
        std::shared_ptr<const void> owner;  // released when the running save has ended
        std::thread::id thread;
        Owner of;
    };
    static void run(State& state, const SavePtr& save);
    static void loop(const std::shared_ptr<State>& state);
    // For the exit of the program.
    struct Open;
    static void remember(const std::shared_ptr<State>& state);
    static void finish_all() noexcept;
    static void finish(State& state);

    std::function<void()> begin_;
    std::shared_ptr<State> state_ = std::make_shared<State>();
    std::thread thread_;
    uint64_t pushed_ = 0;
    pid_t owner_ = ::getpid();
};

}  // namespace tsr
