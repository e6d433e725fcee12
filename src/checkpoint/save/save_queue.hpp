// The saves of a saver's background: one runs on the queue's own thread, later ones wait in order. Filled and asked by
// the saver's thread; each save is known by its number, counted from 1, the same on every rank.
//
// A program that ends (by exit or return from main) with a queue that was not destroyed waits for its saves, where they need
// nothing of the program's any more: its callbacks, its log function and what a state lends it may be gone by then. What is not
// waited for, or not done within the patience, is told on standard error.
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

// A save in flight, as who asked for it sees it; itself done when the save has ended.
class SaveWork final : public Work {
   public:
    // Done when nothing of the state is left to copy; if that is never reached, with the save and its error.
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
        std::function<void()> run;  // throws why the save failed
        std::shared_ptr<SaveWork> work = std::make_shared<SaveWork>();
        uint64_t number = 0;   // set by push
        bool at_once = false;  // set by push: nothing was before it
    };
    using SavePtr = std::shared_ptr<Save>;

    struct Owner {
        std::string root;               // as it is told
        bool calls_program = false;     // a save calls functions of the program's
        milliseconds patience{600000};  // of the program's end
    };

    // `begin` is called first on the queue's thread.
    SaveQueue(std::function<void()> begin, Owner owner);
    // Waits for what is queued. In a completion callback of a save it does not: what is queued then is ABORTED.
    ~SaveQueue();
    SaveQueue(const SaveQueue&) = delete;
    SaveQueue& operator=(const SaveQueue&) = delete;

    // Whether it has a thread, as it has once this was asked, unless the system gives none.
    bool start();
    void push(SavePtr save);  // without a thread the save runs before this returns
    // Takes back the last save if it waits for another one; nullptr if there is none.
    [[nodiscard]] SavePtr withdraw();
    void put_back(SavePtr save);  // what withdraw() gave

    [[nodiscard]] bool idle() const;
    // The number up to which all saves have ended.
    [[nodiscard]] uint64_t ended() const;
    // Returns when idle and every work is done; throws INTERRUPTED only.
    void wait() const;
    // The first failure, not yet told, of the saves up to `number`; those up to it count as told.
    [[nodiscard]] std::optional<Error> failure(uint64_t number);
    // Whether the caller is the thread of the queue.
    [[nodiscard]] bool is_own_thread() const;
    // In a callback of the save that runs: keeps `owner` until that has ended. False anywhere else.
    bool keep_while_running(std::shared_ptr<const void> owner);

   private:
    // Shared with the thread, which outlives the queue when that is destroyed in a callback.
    struct State {
        mutable std::mutex mutex;
        mutable std::condition_variable changed;
        std::deque<SavePtr> waiting;  // all below are guarded by mutex
        SavePtr running;
        uint64_t ended = 0;
        WorkPtr last;                                      // of the save that ended last: done a moment later
        std::vector<std::pair<uint64_t, Error>> failures;  // not yet told
        bool closed = false;
        std::shared_ptr<const void> owner;  // goes when the save that runs has ended
        std::thread::id thread;
        Owner of;
    };
    static void run(State& state, const SavePtr& save);
    static void loop(const std::shared_ptr<State>& state);
    // At the end of the program.
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
