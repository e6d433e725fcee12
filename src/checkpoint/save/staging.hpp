// Where a save in the background keeps its copy of the state: slots of one chunk each from a pool that outlives the save,
// so that their pages are touched once. The trainer's thread fills slots, the writer's threads empty them and give them
// back at once. A pool that has a slot for each chunk of a save never lets the trainer wait; one that does not, because of
// its bound or because memory is short, has its slots go round as a ring, and the trainer waits for the writer.
//
// Each slot carries a stamp, the save's generation and the chunk's number, set when it was filled. It is compared before
// and after the chunk is written: what goes to disk is this save's data, and no other save's or chunk's.
//
// Memory that a write barrier (tensor/write_barrier.hpp) guards may be copied late, while the trainer goes on: by the
// saver's thread, or by the writer of that memory just before it changes it. Chunks that hold some have their slots from
// the begin, so that no such copy waits for the disk.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "checkpoint/io/progress.hpp"
#include "checkpoint/io/stream.hpp"
#include "checkpoint/model/byte_runs.hpp"
#include "comm/host.hpp"
#include "comm/work.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr {

class StagingPool {
   public:
    // A chunk's memory, page-aligned. Owned by whoever took it.
    struct Slot {
        // Makes the first `bytes` resident, in one call instead of a fault a page.
        void prefault(int64_t bytes);

        AlignedBuffer memory{static_cast<size_t>(chunk_bytes)};  // NO_MEMORY
        int64_t resident = 0;
        uint64_t generation = 0;
        size_t chunk = 0;
    };
    using SlotPtr = std::unique_ptr<Slot>;
    using FreeMemory = std::function<std::optional<uint64_t>()>;  // bytes; nullopt: it cannot be told

    // It grows to `bound` bytes (0: there is no bound), and into what is free. INVALID_ARGUMENT unless `bound` is 0 or two
    // chunks or more.
    explicit StagingPool(int64_t bound, FreeMemory free_memory = available_memory);

    // Grows until `slots` are here, or as far as it may. Whether they are, so that nobody will have to wait for one to come
    // back.
    [[nodiscard]] bool make_room_for(size_t slots);
    // nullptr: none is here now. NO_MEMORY: the system gave so few that none may ever be.
    [[nodiscard]] SlotPtr take();
    // Waits at most poll_slice for a slot to come back.
    void wait_for_room() const;
    void give_back(SlotPtr slot) noexcept;
    void trim();  // frees what nobody has taken
    [[nodiscard]] int64_t size_bytes() const;

   private:
    const int64_t bound_;
    const FreeMemory free_memory_;
    mutable std::mutex mutex_;
    mutable std::condition_variable returned_;
    std::vector<SlotPtr> free_;  // guarded by mutex_
    size_t slots_ = 0;           // guarded by mutex_; taken ones included
};

using Barriers = std::vector<std::shared_ptr<WriteBarrier>>;

// One save's files on their way through the pool. One thread stages; the writer's threads read.
class Staging final : public LateCopy, public std::enable_shared_from_this<Staging> {
   public:
    // What `barriers` own is copied late, if the pool holds the whole save; such a staging is made by make_shared. `staged`
    // is finished when nothing is left to copy; of a save that ends before that, it is left to the caller.
    Staging(std::shared_ptr<StagingPool> pool, uint64_t generation, std::vector<ByteRuns> files, milliseconds timeout,
            Barriers barriers = {}, WorkPtr staged = std::make_shared<Work>());
    ~Staging() override;
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    // Whether stage() will not have to wait for the writer.
    [[nodiscard]] bool fits() const { return fits_; }
    // Copies everything but what may be late, on `threads` threads if it fits; returns early if the save has ended. What
    // it throws, the writer's threads throw too.
    void stage(int threads, const ProgressFn& progress);
    // Copies what is late and left; on the saver's thread.
    void copy_late(int threads);
    void copy_now(Memory memory) noexcept override;
    // The save has ended, well or not: nobody reads any more, stage() returns, and nothing late is copied.
    void close() noexcept;

    // What file `index` is copied from, until stage() returns.
    [[nodiscard]] const ByteRuns& original(size_t index) const { return files_[index]; }
    // What the writer takes of file `index`.
    [[nodiscard]] std::unique_ptr<ChunkSource> source(size_t index);

   private:
    class Source;
    enum class When { at_once, late };
    struct Chunk {
        size_t file = 0;
        int64_t begin = 0;
        int64_t end = 0;
        int64_t late_bytes = 0;
        StagingPool::SlotPtr slot;      // guarded by mutex_; filled, not yet written
        StagingPool::SlotPtr reserved;  // guarded by mutex_; as long as nobody has begun to copy what is late
        bool copying = false;           // guarded by mutex_; what is late
    };
    struct LateRun {
        uintptr_t begin;  // its address
        uintptr_t end;
        uintptr_t furthest;  // end of this run and those before it; runs may overlap
        size_t chunk;
    };

    [[nodiscard]] bool is_owned(Memory memory) const;
    void find_late();
    void stage_chunk(size_t index);
    void copy_late_chunk(size_t index) noexcept;
    void copy(const Chunk& chunk, When when, std::byte* to) const;
    void stamp(StagingPool::Slot& slot, size_t index) const;
    void leave_barriers() noexcept;
    StagingPool::SlotPtr wait_for_slot();
    const StagingPool::Slot& filled(size_t index);
    void written(size_t index);
    void check_stamp(const StagingPool::Slot& slot, size_t index) const;

    const std::shared_ptr<StagingPool> pool_;
    const uint64_t generation_;
    const milliseconds timeout_;
    std::vector<ByteRuns> files_;
    std::vector<size_t> first_chunk_;  // of each file
    std::vector<Chunk> chunks_;
    bool fits_ = false;
    Barriers barriers_;
    const WorkPtr staged_;
    std::vector<LateRun> late_runs_;  // by address
    std::mutex mutex_;
    std::condition_variable filled_;
    size_t late_left_ = 0;        // guarded by mutex_; chunks of which something late is not copied
    size_t copying_ = 0;          // guarded by mutex_; of these chunks
    bool closed_ = false;         // guarded by mutex_
    std::optional<Error> error_;  // guarded by mutex_; why nothing more of the save is staged
};

}  // namespace tsr
