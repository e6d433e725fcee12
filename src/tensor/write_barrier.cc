#include "tensor/write_barrier.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>

namespace tsr {

namespace {

const std::byte* end_of(Memory memory) { return memory.data() + memory.size(); }

}  // namespace

WriteBarrier::WriteBarrier(std::vector<Memory> owned) {
    std::erase_if(owned, [](Memory memory) { return memory.empty(); });
    std::sort(owned.begin(), owned.end(),
              [](Memory a, Memory b) { return std::less<const std::byte*>()(a.data(), b.data()); });
    for (const Memory memory : owned) {
        if (owned_.empty() || end_of(owned_.back()) < memory.data()) {
            owned_.push_back(memory);
        } else {
            owned_.back() = {owned_.back().data(), std::max(end_of(owned_.back()), end_of(memory))};
        }
    }
}

bool WriteBarrier::owns(Memory memory) const {
    auto after = std::upper_bound(owned_.begin(), owned_.end(), memory.data(), [](const std::byte* at, Memory one) {
        return std::less<const std::byte*>()(at, one.data());
    });
    return after != owned_.begin() && end_of(memory) <= end_of(*--after);
}

void WriteBarrier::ask(Memory memory) noexcept {
    if (owner_ != ::getpid())
        return;  // a forked child has its own copy of the memory, but not the threads that copy it
    // From last to first, so that a removal in between does not skip a copy.
    size_t next = SIZE_MAX;
    while (true) {
        std::shared_ptr<LateCopy> copy;  // keeps it alive during the call, even if it is removed
        {
            const std::lock_guard lock(mutex_);
            next = std::min(next, copies_.size());
            if (next == 0) return;
            copy = copies_[--next];
        }
        copy->copy_now(memory);
    }
}

void WriteBarrier::before_write_all() noexcept {
    for (const Memory memory : owned_) before_write(memory);
}

void WriteBarrier::add(std::shared_ptr<LateCopy> copy) {
    const std::lock_guard lock(mutex_);
    copies_.push_back(std::move(copy));
    waiting_.store(copies_.size(), std::memory_order_relaxed);  // the caller of add() synchronizes with the writer
}

void WriteBarrier::remove(const LateCopy* copy) noexcept {
    std::shared_ptr<LateCopy> removed;  // freed without the lock
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(copies_.begin(), copies_.end(), [&](const auto& one) { return one.get() == copy; });
    if (found == copies_.end()) return;
    removed = std::move(*found);
    copies_.erase(found);
    waiting_.store(copies_.size(), std::memory_order_release);
}

}  // namespace tsr
