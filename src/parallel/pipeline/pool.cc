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
    Block block{nullptr, size, 0};
    {
        const std::lock_guard lock(mutex_);
        auto best = free_.end();
        for (auto one = free_.begin(); one != free_.end(); ++one) {
            if (fits(one->size, size) && (best == free_.end() || one->size < best->size)) best = one;
        }
        if (best != free_.end()) {
            block = std::move(*best);
            free_.erase(best);
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
    free_.push_back(std::move(block));
}

size_t Pool::peak_bytes() const {
    const std::lock_guard lock(mutex_);
    return peak_;
}

void Pool::begin_step() {
    const std::lock_guard lock(mutex_);
    ++step_;
    blocks_ -= std::erase_if(free_, [&](const Block& block) { return block.used_in + idle_steps < step_; });
    peak_ = in_use_;
}

}  // namespace tsr::pipeline
