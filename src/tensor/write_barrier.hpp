// Coordinates in-place writers of tensors with code that still has to copy them: an optimizer declares the memory that
// only it modifies, and calls before_write() before it modifies a part; a background save defers copying that memory,
// and copies a part at once on request. Neither depends on the other. Thread-safe; a copy completes before the write
// that requested it.
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

// A pending copy of a writer's memory.
class LateCopy {
   public:
    virtual ~LateCopy() = default;
    // Returns when nothing of `memory` is left to copy. Waits at most for memcpy calls of other threads.
    virtual void copy_now(Memory memory) noexcept = 0;
};

class WriteBarrier {
   public:
    // `owned`: the memory that only the writer modifies, and only after before_write().
    explicit WriteBarrier(std::vector<Memory> owned);

    [[nodiscard]] bool owns(Memory memory) const;
    void before_write(Memory memory) noexcept {
        // Acquire: a finished copy has read the memory before the write that follows.
        if (waiting_.load(std::memory_order_acquire) > 0) ask(memory);
    }
    void before_write_all() noexcept;  // call also before freeing the memory

    void add(std::shared_ptr<LateCopy> copy);
    void remove(const LateCopy* copy) noexcept;  // once nothing of it is left to copy

   private:
    void ask(Memory memory) noexcept;

    std::vector<Memory> owned_;  // by address; adjacent ranges are merged
    pid_t owner_ = ::getpid();
    std::mutex mutex_;
    std::vector<std::shared_ptr<LateCopy>> copies_;  // guarded by mutex_
    std::atomic<size_t> waiting_{0};                 // the number of copies_
};

}  // namespace tsr
