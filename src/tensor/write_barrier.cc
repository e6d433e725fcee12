#include "tensor/write_barrier.hpp"

#include <algorithm>
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
            const std::byte* end = std::max(end_of(owned_.back()), end_of(memory));
            owned_.back() = {owned_.back().data(), end};
        }
    }
}

bool WriteBarrier::owns(Memory memory) const {
    auto after = std::upper_bound(owned_.begin(), owned_.end(), memory.data(), [](const std::byte* at, Memory one) {
        return std::less<const std::byte*>()(at, one.data());
    });
    return after != owned_.begin() && end_of(memory) <= end_of(*--after);
}

void WriteBarrier::before_write(Memory memory) {
    for (const auto& copy : copies()) copy->copy_now(memory);
}

void WriteBarrier::before_write_all() {
    for (const Memory memory : owned_) before_write(memory);
}

void WriteBarrier::add(std::shared_ptr<LateCopy> copy) {
    const std::lock_guard lock(mutex_);
    copies_.push_back(std::move(copy));
}

void WriteBarrier::remove(const LateCopy* copy) {
    std::shared_ptr<LateCopy> removed;  // freed without the lock
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(copies_.begin(), copies_.end(), [&](const auto& one) { return one.get() == copy; });
    if (found == copies_.end()) return;
    removed = std::move(*found);
    copies_.erase(found);
}

std::vector<std::shared_ptr<LateCopy>> WriteBarrier::copies() const {
    const std::lock_guard lock(mutex_);
    return copies_;
}

}  // namespace tsr
