#include "parallel/pipeline/pool.hpp"

#include <algorithm>
#include <utility>

#include "base/page_size.hpp"
#include "base/round_up.hpp"

namespace tsr::pipeline {

namespace {

// Shapes may change from step to step, and evaluations come between: a block may rest this long.
constexpr uint64_t idle_steps = 8;

// A block that is much too large would be missing where it fits.
bool fits(size_t block, size_t size) { return block >= size && block <= 2 * size; }

}  // namespace

std::shared_ptr<std::byte> Pool::take(size_t size) {
    size = round_up(std::max<size_t>(size, 1), page_size);
    Block block{nullptr, size, 0, {}};
    {
        const std::lock_guard lock(mutex_);
        auto best = free_.end();
        for (auto one = free_.begin(); one != free_.end(); ++one) {
            if (fits(one->size, size) && (best == free_.end() || one->size < best->size)) best = one;
        }
        if (best != free_.end()) {
            block = std::move(*best);
            free_.erase(best);
            if (!block.uses.empty()) [[unlikely]]
                uses_[block.memory.get()] = std::move(block.uses);
            block.uses.clear();
        } else {
            free_.reserve(++blocks_);  // so that putting one back allocates nothing
        }
        in_use_ += block.size;
        peak_ = std::max(peak_, in_use_);
    }
    try {
        if (!block.memory) block.memory = device_.allocate(block.size);
    } catch (...) {
        const std::lock_guard lock(mutex_);
        in_use_ -= block.size;
        --blocks_;
        throw;
    }
    std::byte* data = block.memory.get();
    return {data, [pool = shared_from_this(), block](std::byte*) { pool->put_back(block); }};
}

void Pool::put_back(Block block) {
    const std::lock_guard lock(mutex_);
    in_use_ -= block.size;
    block.used_in = step_;
    if (!uses_.empty()) [[unlikely]] {
        const auto uses = uses_.extract(block.memory.get());
        if (!uses.empty()) block.uses = std::move(uses.mapped());
    }
    free_.push_back(std::move(block));
}

void Pool::add_use(const std::byte* memory, EventPtr until) {
    const std::lock_guard lock(mutex_);
    uses_[memory].push_back(std::move(until));
}

std::vector<EventPtr> Pool::former_uses(const std::byte* memory) {
    const std::lock_guard lock(mutex_);
    auto uses = uses_.extract(memory);
    return uses.empty() ? std::vector<EventPtr>{} : std::move(uses.mapped());
}

bool Pool::is_used(const Block& block) {
    return !std::ranges::all_of(block.uses, [](const EventPtr& use) { return use->done(); });
}

size_t Pool::peak_bytes() const {
    const std::lock_guard lock(mutex_);
    return peak_;
}

void Pool::begin_step() {
    const std::lock_guard lock(mutex_);
    ++step_;
    blocks_ -=
        std::erase_if(free_, [&](const Block& block) { return block.used_in + idle_steps < step_ && !is_used(block); });
    peak_ = in_use_;
}

}  // namespace tsr::pipeline
