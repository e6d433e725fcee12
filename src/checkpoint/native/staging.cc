#include "checkpoint/native/staging.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/parallel.hpp"

namespace tsr {

namespace {

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif

}  // namespace

StagingPool::Slot::Slot() {
    void* mapped =
        ::mmap(nullptr, static_cast<size_t>(chunk_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        throw Error(Code::no_memory, fmt::format("no memory to stage {} bytes of a save", chunk_bytes));
    }
    memory = static_cast<std::byte*>(mapped);
}

StagingPool::Slot::~Slot() { ::munmap(memory, static_cast<size_t>(chunk_bytes)); }

void StagingPool::Slot::prefault(int64_t bytes) {
    if (bytes <= resident) return;
    (void)::madvise(memory, static_cast<size_t>(bytes), MADV_POPULATE_WRITE);  // else the copy itself faults them in
    resident = bytes;
}

StagingPool::StagingPool(int64_t bound) : bound_(bound) {
    if (bound != 0 && bound < 2 * chunk_bytes) {
        throw Error(Code::invalid_argument, fmt::format("staging_bytes is {}; it is 0 (what the state needs) or at "
                                                        "least {}",
                                                        bound, 2 * chunk_bytes));
    }
}

bool StagingPool::has_room_for(size_t slots) const {
    const std::lock_guard lock(mutex_);
    if (bound_ == 0) return true;
    const auto most = static_cast<size_t>(bound_ / chunk_bytes);
    return slots <= free_.size() + (most - slots_);
}

StagingPool::SlotPtr StagingPool::take() {
    {
        const std::lock_guard lock(mutex_);
        if (!free_.empty()) {
            SlotPtr slot = std::move(free_.back());
            free_.pop_back();
            return slot;
        }
        if (bound_ != 0 && static_cast<int64_t>(slots_ + 1) * chunk_bytes > bound_) return nullptr;
        ++slots_;
    }
    try {
        return std::make_unique<Slot>();
    } catch (...) {
        const std::lock_guard lock(mutex_);
        --slots_;
        throw;
    }
}

void StagingPool::wait_for_room() const {
    std::unique_lock lock(mutex_);
    if (free_.empty()) returned_.wait_for(lock, poll_slice);
}

void StagingPool::give_back(SlotPtr slot) {
    if (slot == nullptr) return;
    {
        const std::lock_guard lock(mutex_);
        free_.push_back(std::move(slot));
    }
    returned_.notify_all();
}

void StagingPool::trim() {
    std::vector<SlotPtr> unused;
    const std::lock_guard lock(mutex_);
    unused.swap(free_);
    slots_ -= unused.size();
}

int64_t StagingPool::size_bytes() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(slots_) * chunk_bytes;
}

// A file's data as the writer sees it: every chunk stands in one slot.
class Staging::Source final : public ChunkSource {
   public:
    Source(Staging& staging, size_t first, int64_t size) : staging_(staging), first_(first), size_(size) {}

    int64_t size() const override { return size_; }
    const std::byte* contiguous(int64_t begin, int64_t) const override {
        return staging_.filled(chunk_of(begin)).memory + begin % chunk_bytes;
    }
    void copy(int64_t begin, int64_t end, std::byte* to) const override {
        std::memcpy(to, contiguous(begin, end), static_cast<size_t>(end - begin));
    }
    void written(int64_t begin) const override { staging_.written(chunk_of(begin)); }

   private:
    size_t chunk_of(int64_t offset) const { return first_ + static_cast<size_t>(offset / chunk_bytes); }

    Staging& staging_;
    size_t first_;
    int64_t size_;
};

Staging::Staging(StagingPool& pool, uint64_t generation, std::vector<ByteRuns> files, milliseconds timeout)
    : pool_(pool), generation_(generation), timeout_(timeout), files_(std::move(files)) {
    for (size_t file = 0; file < files_.size(); ++file) {
        first_chunk_.push_back(chunks_.size());
        for (int64_t begin = 0; begin < files_[file].size(); begin += chunk_bytes) {
            chunks_.push_back({file, begin, std::min(begin + chunk_bytes, files_[file].size()), nullptr});
        }
    }
}

Staging::~Staging() { close(); }

std::unique_ptr<ChunkSource> Staging::source(size_t index) {
    return std::make_unique<Source>(*this, first_chunk_[index], files_[index].size());
}

void Staging::stage(int threads, const ProgressFn& progress) {
    int64_t total = 0;
    for (const ByteRuns& file : files_) total += file.size();
    Progress counted(progress, Phase::stage, total);
    try {
        // As a ring it runs on this thread alone, which may be interrupted while it waits.
        run_parallel(
            chunks_.size(), fits() ? threads : 1,
            [&](size_t index, int) {
                stage_chunk(index);
                counted.add(chunks_[index].end - chunks_[index].begin);
            },
            [&] { counted.poll(); });
        counted.finish();
    } catch (...) {
        {
            const std::lock_guard lock(mutex_);
            error_ = current_error();
        }
        filled_.notify_all();
        throw;
    }
}

void Staging::stage_chunk(size_t index) {
    Chunk& chunk = chunks_[index];
    StagingPool::SlotPtr slot = wait_for_slot();
    if (slot == nullptr) return;  // closed
    slot->prefault(chunk.end - chunk.begin);
    files_[chunk.file].copy(chunk.begin, chunk.end, slot->memory);
    slot->generation = generation_;
    slot->chunk = index;
    StagingPool::SlotPtr unwanted;  // if nobody reads any more
    {
        const std::lock_guard lock(mutex_);
        (closed_ ? unwanted : chunk.slot) = std::move(slot);
    }
    pool_.give_back(std::move(unwanted));
    filled_.notify_all();
}

StagingPool::SlotPtr Staging::wait_for_slot() {
    while (true) {
        {
            const std::lock_guard lock(mutex_);
            if (closed_) return nullptr;
        }
        if (auto slot = pool_.take()) return slot;
        pool_.wait_for_room();
        poll_interrupt();
    }
}

void Staging::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (Chunk& chunk : chunks_) pool_.give_back(std::move(chunk.slot));
}

const StagingPool::Slot& Staging::filled(size_t index) {
    const Deadline deadline = Deadline::in(timeout_);
    std::unique_lock lock(mutex_);
    const auto& slot = chunks_[index].slot;
    while (slot == nullptr) {
        if (error_) throw Error(*error_);
        if (deadline.expired()) {
            throw Error(Code::timeout, fmt::format("chunk {} of {} was not staged within {} ms", index, chunks_.size(),
                                                   timeout_.count()));
        }
        filled_.wait_for(lock, deadline.slice());
    }
    check_stamp(*slot, index);
    return *slot;
}

void Staging::written(size_t index) {
    StagingPool::SlotPtr slot;
    {
        const std::lock_guard lock(mutex_);
        slot = std::move(chunks_[index].slot);
    }
    check_stamp(*slot, index);
    pool_.give_back(std::move(slot));
}

void Staging::check_stamp(const StagingPool::Slot& slot, size_t index) const {
    if (slot.generation == generation_ && slot.chunk == index) return;
    throw Error(Code::internal,
                fmt::format("the staging memory of save {}, chunk {}, holds save {}, chunk {}; nothing of it is saved",
                            generation_, index, slot.generation, slot.chunk));
}

}  // namespace tsr
