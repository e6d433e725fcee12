#include "checkpoint/save/staging.hpp"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/attempt.hpp"
#include "base/log.hpp"
#include "base/parallel.hpp"
#include "base/stream_copy.hpp"

namespace tsr {

namespace {

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif

constexpr milliseconds settle_timeout{60000};
constexpr size_t least_slots = 2;  // for a ring: one is filled while the other is written

}  // namespace

void StagingPool::Slot::prefault(int64_t bytes) {
    if (bytes <= resident) return;
    // Where the system does not know it, the copy itself faults them in.
    (void)::madvise(memory.data(), static_cast<size_t>(bytes), MADV_POPULATE_WRITE);
    resident = bytes;
}

void StagingPool::Slot::pin(DeviceApi& device) {
    if (pinned != nullptr) return;
    pinned = device.register_host(memory.data(), memory.size());
    resident = chunk_bytes;
}

void StagingPool::Slot::settle(Deadline deadline) {
    for (const auto& arrival : arrivals) arrival->wait(deadline);
    arrivals.clear();
}

StagingPool::Slot::~Slot() {
    const auto settled = [this] { settle(Deadline::in(settle_timeout)); };
    if (!attempt(settled)) return;
    const auto error = attempt(settled);
    if (!error || error->code() == Code::cuda) return;  // a device that has failed for good copies nothing more
    static_cast<void>(new auto(std::move(memory)));     // NOLINT(cppcoreguidelines-owning-memory): a copy may still run
    static_cast<void>(new auto(std::move(pinned)));     // NOLINT(cppcoreguidelines-owning-memory)
}

StagingPool::StagingPool(int64_t bound, FreeMemory free_memory) : bound_(bound), free_memory_(std::move(free_memory)) {
    if (bound != 0 && bound < static_cast<int64_t>(least_slots) * chunk_bytes) {
        throw Error(Code::invalid_argument, fmt::format("staging_bytes is {}; it must be 0 (what the state needs) or "
                                                        "at least {}",
                                                        bound, static_cast<int64_t>(least_slots) * chunk_bytes));
    }
}

bool StagingPool::make_room_for(size_t slots) {
    const std::lock_guard lock(mutex_);
    size_t most = bound_ == 0 ? SIZE_MAX : static_cast<size_t>(bound_ / chunk_bytes) - (slots_ - free_.size());
    if (slots > free_.size() && free_.size() < most) {
        int64_t resident = 0;
        for (const SlotPtr& slot : free_) resident += slot->resident;
        const int64_t wanted = static_cast<int64_t>(std::min(slots, most)) * chunk_bytes - resident;
        const int64_t there = static_cast<int64_t>(free_memory_().value_or(INT64_MAX));
        if (wanted > there) {
            log::warning(
                "only {} bytes of memory are free to stage a save of {} bytes; part of it is written before the call "
                "returns",
                there, static_cast<int64_t>(slots) * chunk_bytes);
            most = std::min(most, std::max(least_slots, static_cast<size_t>((there + resident) / chunk_bytes)));
        }
    }
    try {
        while (free_.size() < std::min(slots, most)) {
            free_.reserve(slots_ + 1);  // so that giving back never fails
            free_.push_back(std::make_unique<Slot>());
            ++slots_;
        }
    } catch (const std::exception& error) {
        log::warning("{}; part of the save is written before the call returns", error.what());
    }
    return slots <= free_.size();
}

StagingPool::SlotPtr StagingPool::take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
        if (slots_ < least_slots) {
            throw Error(Code::no_memory, fmt::format("cannot allocate {} bytes to stage a save", chunk_bytes));
        }
        return nullptr;
    }
    SlotPtr slot = std::move(free_.back());
    free_.pop_back();
    return slot;
}

void StagingPool::wait_for_room() const {
    std::unique_lock lock(mutex_);
    if (free_.empty()) returned_.wait_for(lock, poll_slice);
}

void StagingPool::give_back(SlotPtr slot) noexcept {
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

// A file's data as the writer sees it: every chunk is in one slot.
class Staging::Source final : public ChunkSource {
   public:
    Source(Staging& staging, size_t first, int64_t size) : staging_(staging), first_(first), size_(size) {}

    int64_t size() const override { return size_; }
    const std::byte* contiguous(int64_t begin, int64_t) const override {
        return staging_.filled(chunk_of(begin)).memory.data() + begin % chunk_bytes;
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

Staging::Staging(std::shared_ptr<StagingPool> pool, uint64_t generation, std::vector<ByteRuns> files,
                 milliseconds timeout, Barriers barriers, WorkPtr staged)
    : pool_(std::move(pool)),
      generation_(generation),
      timeout_(timeout),
      files_(std::move(files)),
      barriers_(std::move(barriers)),
      staged_(std::move(staged)) {
    for (size_t file = 0; file < files_.size(); ++file) {
        first_chunk_.push_back(chunks_.size());
        for (int64_t begin = 0; begin < files_[file].size(); begin += chunk_bytes) {
            Chunk& chunk = chunks_.emplace_back();
            chunk.file = file;
            chunk.begin = begin;
            chunk.end = std::min(begin + chunk_bytes, files_[file].size());
        }
    }
    fits_ = pool_->make_room_for(chunks_.size());
    if (!barriers_.empty() && fits_) find_late();
    if (std::any_of(files_.begin(), files_.end(), [](const ByteRuns& file) { return file.has_devices(); })) {
        find_devices();
    }
}

bool Staging::is_owned(Memory memory) const {
    return std::any_of(barriers_.begin(), barriers_.end(), [&](const auto& barrier) { return barrier->owns(memory); });
}

void Staging::find_late() {
    for (size_t index = 0; index < chunks_.size(); ++index) {
        Chunk& chunk = chunks_[index];
        files_[chunk.file].for_each_run(chunk.begin, chunk.end, [&](const ByteRuns::Part& run) {
            if (run.on != nullptr || !is_owned(run.bytes)) return;
            const auto begin = reinterpret_cast<uintptr_t>(run.bytes.data());
            late_runs_.push_back({begin, begin + run.bytes.size(), 0, index});
            chunk.late_bytes += static_cast<int64_t>(run.bytes.size());
        });
        if (chunk.late_bytes > 0) ++late_left_;
    }
    std::sort(late_runs_.begin(), late_runs_.end(),
              [](const LateRun& a, const LateRun& b) { return a.begin < b.begin; });
    uintptr_t furthest = 0;
    for (LateRun& run : late_runs_) run.furthest = furthest = std::max(furthest, run.end);
}

// First the chunks with memory of devices that nothing guards, as the program waits for their copies; then those whose
// memory of devices is guarded, and those on the host. A ring is filled in the order in which it is written.
void Staging::find_devices() {
    std::vector<size_t> guarded;
    std::vector<size_t> others;
    const auto add = [](std::vector<CopyStream*>& list, CopyStream* one) {
        if (std::find(list.begin(), list.end(), one) == list.end()) list.push_back(one);
    };
    for (size_t index = 0; index < chunks_.size(); ++index) {
        Chunk& chunk = chunks_[index];
        bool has_guarded = false;
        bool has_unguarded = false;
        files_[chunk.file].for_each_run(chunk.begin, chunk.end, [&](const ByteRuns::Part& run) {
            if (run.on == nullptr) return;
            chunk.device_bytes += static_cast<int64_t>(run.bytes.size());
            if (fits_ && is_owned(run.bytes)) {
                const auto begin = reinterpret_cast<uintptr_t>(run.bytes.data());
                guarded_.push_back({begin, begin + run.bytes.size(), run.on});
                add(to_lead_, run.on);
                has_guarded = true;
            } else {
                add(devices_, run.on);
                has_unguarded = true;
            }
        });
        (!fits_ || has_unguarded ? in_order_ : has_guarded ? guarded : others).push_back(index);
    }
    unguarded_ = in_order_.size();
    in_order_.insert(in_order_.end(), guarded.begin(), guarded.end());
    in_order_.insert(in_order_.end(), others.begin(), others.end());
    std::sort(guarded_.begin(), guarded_.end(),
              [](const GuardedRun& a, const GuardedRun& b) { return a.begin < b.begin; });
    if (fits_) ++late_left_;
}

Staging::~Staging() { close(); }

std::unique_ptr<ChunkSource> Staging::source(size_t index) {
    return std::make_unique<Source>(*this, first_chunk_[index], files_[index].size());
}

void Staging::stage(int threads, const ProgressFn& progress) {
    int64_t total = 0;
    for (const Chunk& chunk : chunks_) total += chunk.end - chunk.begin - chunk.late_bytes;
    Progress counted(progress, Phase::stage, total);
    try {
        const auto stage_range = [&](size_t first, size_t last) {
            // A ring is filled only by this thread, which may be interrupted while it waits.
            run_parallel(
                last - first, fits_ && total > 0 ? threads : 1,
                [&](size_t place, int) {
                    const size_t index = in_order_.empty() ? first + place : in_order_[first + place];
                    stage_chunk(index);
                    counted.add(chunks_[index].end - chunks_[index].begin - chunks_[index].late_bytes);
                },
                [&] { counted.poll(); });
        };
        if (!in_order_.empty()) {
            stage_range(0, unguarded_);
            for (CopyStream* device : devices_) device->lead();
        }
        stage_range(unguarded_, chunks_.size());
        counted.finish();
        // Their slots are reserved: from here on the owner of the memory may request the copies.
        if (!late_runs_.empty() || !guarded_.empty()) {
            for (const auto& barrier : barriers_) barrier->add(shared_from_this());
        }
        if (!late_runs_.empty() || (fits_ && !in_order_.empty())) return;
        if (!in_order_.empty()) wait_for_devices();
    } catch (...) {
        {
            const std::lock_guard lock(mutex_);
            error_ = current_error();
        }
        filled_.notify_all();
        staged_->finish(current_error());
        throw;
    }
    bool is_closed = false;  // then it was not all copied
    {
        const std::lock_guard lock(mutex_);
        is_closed = closed_;
    }
    if (!is_closed) staged_->finish(std::nullopt);
}

void Staging::stage_chunk(size_t index) {
    Chunk& chunk = chunks_[index];
    StagingPool::SlotPtr slot = wait_for_slot();
    if (slot == nullptr) return;  // closed
    if (chunk.device_bytes > 0) {
        try {
            put_copies(chunk, *slot);
        } catch (...) {
            pool_->give_back(std::move(slot));
            throw;
        }
    }
    const bool has_late = chunk.late_bytes > 0;
    if (!has_late) {
        slot->prefault(chunk.end - chunk.begin);
        stamp(*slot, index);
    }
    if (chunk.late_bytes < chunk.end - chunk.begin) copy(chunk, When::at_once, slot->memory.data());
    StagingPool::SlotPtr unwanted;  // if the save has ended
    {
        const std::lock_guard lock(mutex_);
        (closed_ ? unwanted : has_late ? chunk.reserved : chunk.slot) = std::move(slot);
    }
    pool_->give_back(std::move(unwanted));
    filled_.notify_all();
}

void Staging::copy_late(int threads) {
    std::vector<size_t> late;
    for (size_t index = 0; index < chunks_.size(); ++index) {
        if (chunks_[index].late_bytes > 0) late.push_back(index);
    }
    run_parallel(late.size(), threads, [&](size_t i, int) { copy_late_chunk(late[i]); });
    if (in_order_.empty() || !fits_) return;
    wait_for_devices();
    const auto torn = [this] {
        const std::lock_guard lock(mutex_);
        return error_;
    }();
    late_part_done();
    if (torn) throw Error(*torn);
}

void Staging::wait_for_devices() {
    const Deadline deadline = Deadline::in(timeout_);
    for (const Chunk& chunk : chunks_) {
        Arrivals arrivals;
        {
            const std::lock_guard lock(mutex_);
            arrivals = chunk.arrivals;
        }
        for (const auto& arrival : arrivals) arrival->wait(deadline);
    }
}

void Staging::lead_before(Memory write) noexcept {
    const auto begin = reinterpret_cast<uintptr_t>(write.data());
    const auto end = begin + write.size();
    const std::lock_guard lock(mutex_);
    for (const GuardedRun& run : guarded_) {
        if (to_lead_.empty() || run.begin >= end) return;
        if (run.end <= begin || std::erase(to_lead_, run.on) == 0) continue;
        const auto error = attempt([&] { run.on->lead(); });
        if (error && !error_) error_ = error;  // the copy may be torn: the memory changes now
    }
}

void Staging::copy_now(Memory memory) noexcept {
    if (!guarded_.empty()) lead_before(memory);
    const auto begin = reinterpret_cast<uintptr_t>(memory.data());
    const auto end = begin + memory.size();
    const auto first = std::partition_point(late_runs_.begin(), late_runs_.end(),
                                            [&](const LateRun& run) { return run.furthest <= begin; });
    auto last = first;
    for (; last != late_runs_.end() && last->begin < end; ++last) copy_late_chunk(last->chunk);
    // Wait for copies that other threads have begun; those threads wait for nobody.
    const Deadline deadline = Deadline::in(timeout_);
    std::unique_lock lock(mutex_);
    for (auto run = first; run != last; ++run) {
        while (chunks_[run->chunk].copying) {
            if (deadline.expired()) {  // the copy may be torn: the memory changes now
                if (!error_) {
                    error_ = Error(Code::timeout, fmt::format("chunk {} of {} was not copied within {} ms", run->chunk,
                                                              chunks_.size(), timeout_.count()));
                }
                return;
            }
            filled_.wait_for(lock, deadline.slice());
        }
    }
}

void Staging::copy_late_chunk(size_t index) noexcept {
    Chunk& chunk = chunks_[index];
    StagingPool::SlotPtr slot;
    {
        const std::lock_guard lock(mutex_);
        if (chunk.reserved == nullptr) return;  // the copy has begun elsewhere, or the save has ended
        slot = std::move(chunk.reserved);
        chunk.copying = true;
        ++copying_;
    }
    slot->prefault(chunk.end - chunk.begin);
    copy(chunk, When::late, slot->memory.data());
    stamp(*slot, index);
    StagingPool::SlotPtr unwanted;
    {
        const std::lock_guard lock(mutex_);
        chunk.copying = false;
        --copying_;
        (closed_ || error_ ? unwanted : chunk.slot) = std::move(slot);
    }
    pool_->give_back(std::move(unwanted));
    filled_.notify_all();
    late_part_done();
}

void Staging::late_part_done() noexcept {
    std::optional<Error> error;
    {
        const std::lock_guard lock(mutex_);
        if (--late_left_ > 0) return;
        error = error_;
    }
    leave_barriers();
    staged_->finish(error);
}

void Staging::copy(const Chunk& chunk, When when, std::byte* to) const {
    const bool all = chunk.late_bytes == (when == When::late ? chunk.end - chunk.begin : 0);
    files_[chunk.file].for_each_run(chunk.begin, chunk.end, [&](const ByteRuns::Part& run) {
        if (run.on == nullptr && (all || is_owned(run.bytes) == (when == When::late))) {
            stream_copy(to, run.bytes.data(), run.bytes.size());
        }
        to += run.bytes.size();
    });
}

void Staging::put_copies(Chunk& chunk, StagingPool::Slot& slot) const {
    // Of a save that was withdrawn: copies on their way into the slot, which only copies of devices can follow.
    if (chunk.device_bytes < chunk.end - chunk.begin) slot.settle(Deadline::in(timeout_));
    std::vector<CopyStream*> used;
    Arrivals arrivals;
    const auto record = [&] {
        for (CopyStream* one : used) arrivals.push_back(one->record());
    };
    try {
        std::byte* to = slot.memory.data();
        files_[chunk.file].for_each_run(chunk.begin, chunk.end, [&](const ByteRuns::Part& run) {
            if (run.on != nullptr) {
                if (std::find(used.begin(), used.end(), run.on) == used.end()) {
                    slot.pin(run.on->device());
                    for (const auto& earlier : slot.arrivals) run.on->follow(*earlier);
                    used.push_back(run.on);
                }
                run.on->copy(to, run.bytes.data(), run.bytes.size());
            }
            to += run.bytes.size();
        });
        record();
    } catch (...) {
        (void)attempt(record);  // for what was put before
        slot.arrivals.insert(slot.arrivals.end(), arrivals.begin(), arrivals.end());
        throw;
    }
    slot.arrivals = arrivals;
    chunk.arrivals = std::move(arrivals);
}

void Staging::stamp(StagingPool::Slot& slot, size_t index) const {
    slot.generation = generation_;
    slot.chunk = index;
}

void Staging::leave_barriers() noexcept {
    for (const auto& barrier : barriers_) barrier->remove(this);
}

StagingPool::SlotPtr Staging::wait_for_slot() {
    while (true) {
        {
            const std::lock_guard lock(mutex_);
            if (closed_) return nullptr;
        }
        if (auto slot = pool_->take()) return slot;
        pool_->wait_for_room();
        poll_interrupt();
    }
}

void Staging::close() noexcept {
    {
        std::unique_lock lock(mutex_);
        if (closed_) return;
        closed_ = true;
        for (Chunk& chunk : chunks_) {
            pool_->give_back(std::move(chunk.slot));
            pool_->give_back(std::move(chunk.reserved));
        }
        // Writers of memory that is being copied are held back only while the barriers know this object.
        const Deadline deadline = Deadline::in(timeout_);
        while (copying_ > 0 && !deadline.expired()) filled_.wait_for(lock, deadline.slice());
    }
    leave_barriers();
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
    const StagingPool::Slot& found = *slot;
    lock.unlock();
    for (const auto& arrival : chunks_[index].arrivals) arrival->wait(deadline);
    return found;
}

void Staging::written(size_t index) {
    StagingPool::SlotPtr slot;
    {
        const std::lock_guard lock(mutex_);
        slot = std::move(chunks_[index].slot);
        chunks_[index].arrivals.clear();
    }
    slot->arrivals.clear();  // filled() has waited for them
    check_stamp(*slot, index);
    pool_->give_back(std::move(slot));
}

void Staging::check_stamp(const StagingPool::Slot& slot, size_t index) const {
    if (slot.generation == generation_ && slot.chunk == index) return;
    throw Error(Code::internal,
                fmt::format("the staging memory of save {}, chunk {}, holds save {}, chunk {}; the save is discarded",
                            generation_, index, slot.generation, slot.chunk));
}

}  // namespace tsr
