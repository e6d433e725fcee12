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

uintptr_t address_of(const std::byte* memory) { return reinterpret_cast<uintptr_t>(memory); }

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

Staging::Staging(StagingPool& pool, uint64_t generation, std::vector<ByteRuns> files, milliseconds timeout,
                 Barriers barriers)
    : pool_(pool),
      generation_(generation),
      timeout_(timeout),
      files_(std::move(files)),
      barriers_(std::move(barriers)) {
    for (size_t file = 0; file < files_.size(); ++file) {
        first_chunk_.push_back(chunks_.size());
        for (int64_t begin = 0; begin < files_[file].size(); begin += chunk_bytes) {
            Chunk& chunk = chunks_.emplace_back();
            chunk.file = file;
            chunk.begin = begin;
            chunk.end = std::min(begin + chunk_bytes, files_[file].size());
        }
    }
    if (!barriers_.empty() && fits()) find_late();
}

void Staging::find_late() {
    for (size_t index = 0; index < chunks_.size(); ++index) {
        Chunk& chunk = chunks_[index];
        std::vector<LateRun> runs;
        bool owned = true;
        files_[chunk.file].for_each_run(chunk.begin, chunk.end, [&](Memory run) {
            owned = owned && std::any_of(barriers_.begin(), barriers_.end(),
                                         [&](const auto& barrier) { return barrier->owns(run); });
            runs.push_back({run, index});
        });
        chunk.late = owned;
        if (owned) late_runs_.insert(late_runs_.end(), runs.begin(), runs.end());
    }
    std::sort(late_runs_.begin(), late_runs_.end(), [](const LateRun& a, const LateRun& b) {
        return address_of(a.memory.data()) < address_of(b.memory.data());
    });
}

Staging::~Staging() { close(); }

std::unique_ptr<ChunkSource> Staging::source(size_t index) {
    return std::make_unique<Source>(*this, first_chunk_[index], files_[index].size());
}

void Staging::stage(int threads, const ProgressFn& progress) {
    const bool at_once = fits();
    int64_t total = 0;
    std::vector<size_t> now;
    for (size_t index = 0; index < chunks_.size(); ++index) {
        if (chunks_[index].late) continue;
        now.push_back(index);
        total += chunks_[index].end - chunks_[index].begin;
    }
    Progress counted(progress, Phase::stage, total);
    try {
        if (!late_runs_.empty()) reserve_late();
        // As a ring it runs on this thread alone, which may be interrupted while it waits.
        run_parallel(
            now.size(), at_once ? threads : 1,
            [&](size_t i, int) {
                const Chunk& chunk = chunks_[now[i]];
                stage_chunk(now[i]);
                counted.add(chunk.end - chunk.begin);
            },
            [&] { counted.poll(); });
        counted.finish();
        // From here on their owner may ask for them.
        if (!late_runs_.empty()) {
            for (const auto& barrier : barriers_) barrier->add(shared_from_this());
        }
    } catch (...) {
        {
            const std::lock_guard lock(mutex_);
            error_ = current_error();
        }
        filled_.notify_all();
        throw;
    }
}

void Staging::reserve_late() {
    for (Chunk& chunk : chunks_) {
        if (!chunk.late) continue;
        StagingPool::SlotPtr slot = wait_for_slot();
        const std::lock_guard lock(mutex_);
        chunk.reserved = std::move(slot);
    }
}

void Staging::copy_late(int threads) {
    std::vector<size_t> late;
    for (size_t index = 0; index < chunks_.size(); ++index) {
        if (chunks_[index].late) late.push_back(index);
    }
    run_parallel(late.size(), threads, [&](size_t i, int) { copy_late_chunk(late[i]); });
}

void Staging::copy_now(Memory memory) noexcept {
    const auto begin = address_of(memory.data());
    const auto end = begin + memory.size();
    // No run is longer than a chunk.
    const auto first = std::partition_point(late_runs_.begin(), late_runs_.end(), [&](const LateRun& run) {
        return address_of(run.memory.data()) + static_cast<uintptr_t>(chunk_bytes) <= begin;
    });
    auto last = first;
    for (; last != late_runs_.end() && address_of(last->memory.data()) < end; ++last) {
        if (address_of(last->memory.data()) + last->memory.size() > begin) copy_late_chunk(last->chunk);
    }
    // What other threads have begun; none of them waits for anything.
    const Deadline deadline = Deadline::in(timeout_);
    std::unique_lock lock(mutex_);
    for (auto run = first; run != last; ++run) {
        while (chunks_[run->chunk].copying && !deadline.expired()) filled_.wait_for(lock, deadline.slice());
    }
}

void Staging::copy_late_chunk(size_t index) {
    Chunk& chunk = chunks_[index];
    StagingPool::SlotPtr slot;
    {
        const std::lock_guard lock(mutex_);
        if (chunk.reserved == nullptr) return;  // begun, or the save has ended
        slot = std::move(chunk.reserved);
        chunk.copying = true;
        ++copying_;
    }
    fill(index, *slot);
    {
        const std::lock_guard lock(mutex_);
        chunk.copying = false;
        --copying_;
        if (!closed_) chunk.slot = std::move(slot);
        pool_.give_back(std::move(slot));  // only if nobody reads any more; not later: close() waits for this
        filled_.notify_all();
    }
}

void Staging::fill(size_t index, StagingPool::Slot& slot) const {
    const Chunk& chunk = chunks_[index];
    slot.prefault(chunk.end - chunk.begin);
    files_[chunk.file].copy(chunk.begin, chunk.end, slot.memory);
    slot.generation = generation_;
    slot.chunk = index;
}

void Staging::stage_chunk(size_t index) {
    Chunk& chunk = chunks_[index];
    StagingPool::SlotPtr slot = wait_for_slot();
    if (slot == nullptr) return;  // closed
    fill(index, *slot);
    {
        const std::lock_guard lock(mutex_);
        if (!closed_) chunk.slot = std::move(slot);
    }
    pool_.give_back(std::move(slot));  // only if nobody reads any more
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
    {
        std::unique_lock lock(mutex_);
        if (closed_) return;
        closed_ = true;
        for (Chunk& chunk : chunks_) {
            pool_.give_back(std::move(chunk.slot));
            pool_.give_back(std::move(chunk.reserved));
        }
        const Deadline deadline = Deadline::in(timeout_);  // what is copied now uses the pool, which may go then
        while (copying_ > 0 && !deadline.expired()) filled_.wait_for(lock, deadline.slice());
    }
    for (const auto& barrier : barriers_) barrier->remove(this);
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
