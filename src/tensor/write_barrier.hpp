// Where who writes tensors in place meets who still has to copy them: an optimizer names the memory that nobody but it
// changes, and asks before it changes a part; a save in the background leaves that memory to be copied later, and is told
// what is wanted at once. Neither knows the other. Any thread may call; a copy happens before the write that asked for it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace tsr {

using Memory = std::span<const std::byte>;

// What is yet to be copied of a writer's memory.
class LateCopy {
   public:
    virtual ~LateCopy() = default;
    // Returns when nothing of `memory` is left to copy. Waits for other threads' memcpy at most.
    virtual void copy_now(Memory memory) noexcept = 0;
};

class WriteBarrier {
   public:
    // What the writer alone changes, and only after before_write(): once, before anybody else knows the barrier.
    explicit WriteBarrier(std::vector<Memory> owned);

    [[nodiscard]] bool owns(Memory memory) const;
    void before_write(Memory memory) noexcept {
        // Acquire: what a copy that is gone has read, it read before what is written now.
        if (waiting_.load(std::memory_order_acquire) > 0) ask(memory);
    }
    void before_write_all() noexcept;  // also before the memory goes

    void add(std::shared_ptr<LateCopy> copy);
    void remove(const LateCopy* copy) noexcept;  // nothing of it is left to copy

   private:
    void ask(Memory memory) noexcept;

    std::vector<Memory> owned_;  // by address; neighbours are one
    pid_t owner_ = ::getpid();
    std::mutex mutex_;
    std::vector<std::shared_ptr<LateCopy>> copies_;  // guarded by mutex_
    std::atomic<size_t> waiting_{0};                 // how many they are
};

}  // namespace tsr
