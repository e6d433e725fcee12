// The copy of the state that a background save writes: slots of one chunk each, from a pool that outlives the save so
// that their pages are touched only once. The trainer's thread fills slots; the writer's threads empty them and return
// them at once. With a slot for every chunk of a save the trainer never waits. With fewer, because of the bound or a
// lack of memory, the slots form a ring and the trainer waits for the writer.
//
// Each slot carries a stamp, the save's generation and the chunk's number, set when it is filled. It is compared before
// and after the chunk is written, so that data of another save or chunk never reaches the disk.
//
// Memory guarded by a write barrier (tensor/write_barrier.hpp) may be copied late, while the trainer goes on: by the
// saver's thread, or by the writer of that memory just before it changes it. Chunks with such memory have their slots
// from the start, so no such copy waits for the disk.
//
// Memory of devices is never copied by a thread: stage() puts the copies on the device's copy stream, into slots that are
// pinned, and the writer's threads wait until they have arrived. What the program puts on its stream later waits for them
// on the device: at once or, of memory guarded by a write barrier, once its writer announces a write.
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
#include "device/copy_streams.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr {

// What copies of devices into a chunk wait for; done when they have arrived.
using Arrivals = std::vector<std::shared_ptr<const DeviceEvent>>;

class StagingPool {
   public:
    // The memory of one chunk, page-aligned. Owned by its taker.
    struct Slot {
        Slot() = default;
        ~Slot();
        Slot(const Slot&) = delete;
        Slot& operator=(const Slot&) = delete;

        // Makes the first `bytes` resident with one call instead of one fault per page.
        void prefault(int64_t bytes);
        // Makes copies of devices reach the memory directly; it stays so.
        void pin(DeviceApi& device);
        // Waits until no copy of a device is on its way into the memory.
        void settle(Deadline deadline);

        AlignedBuffer memory{static_cast<size_t>(chunk_bytes)};  // NO_MEMORY
        std::shared_ptr<void> pinned;
        Arrivals arrivals;
        int64_t resident = 0;
        uint64_t generation = 0;
        size_t chunk = 0;
    };
    using SlotPtr = std::unique_ptr<Slot>;
    using FreeMemory = std::function<std::optional<uint64_t>()>;  // bytes; nullopt: unknown

    // Grows up to `bound` bytes (0: no bound) and the free memory. INVALID_ARGUMENT unless `bound` is 0 or at least two
    // chunks.
    explicit StagingPool(int64_t bound, FreeMemory free_memory = available_memory);

    // Grows to `slots` free slots, or as far as it may. True if they are all there, so that nobody has to wait for a
    // slot to be returned.
    [[nodiscard]] bool make_room_for(size_t slots);
    // nullptr: none is free now. NO_MEMORY: the pool is so small that waiting might never end.
    [[nodiscard]] SlotPtr take();
    // Waits at most poll_slice for a slot to be returned.
    void wait_for_room() const;
    void give_back(SlotPtr slot) noexcept;
    void trim();  // frees the slots that are not taken
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

// The files of one save on their way through the pool. One thread stages; the writer's threads read.
class Staging final : public LateCopy, public std::enable_shared_from_this<Staging> {
   public:
    // Memory owned by `barriers` is copied late if the pool holds the complete save; create such an object with
    // make_shared. `staged` is finished when everything is copied; if the save ends earlier, finishing it is left to
    // the caller.
    Staging(std::shared_ptr<StagingPool> pool, uint64_t generation, std::vector<ByteRuns> files, milliseconds timeout,
            Barriers barriers = {}, WorkPtr staged = std::make_shared<Work>());
    ~Staging() override;
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    // True if stage() never waits for the writer.
    [[nodiscard]] bool fits() const { return fits_; }
    // Copies everything that may not be late, on `threads` threads if it fits. Returns early if the save has ended. The
    // writer's threads throw the same error as this.
    void stage(int threads, const ProgressFn& progress);
    // Copies the late memory that is left, and waits for the copies of devices; call on the saver's thread.
    void copy_late(int threads);
    void copy_now(Memory memory) noexcept override;
    // Call when the save has ended, successfully or not: nothing is read any more, stage() returns, no late copies are
    // made.
    void close() noexcept;

    // The memory that file `index` is copied from; valid until stage() returns.
    [[nodiscard]] const ByteRuns& original(size_t index) const { return files_[index]; }
    // The chunks of file `index` for the writer.
    [[nodiscard]] std::unique_ptr<ChunkSource> source(size_t index);

   private:
    class Source;
    enum class When { at_once, late };
    struct Chunk {
        size_t file = 0;
        int64_t begin = 0;
        int64_t end = 0;
        int64_t late_bytes = 0;
        int64_t device_bytes = 0;
        Arrivals arrivals;              // set before the slot is
        StagingPool::SlotPtr slot;      // guarded by mutex_; filled, not yet written
        StagingPool::SlotPtr reserved;  // guarded by mutex_; until the late copy begins
        bool copying = false;           // guarded by mutex_; the late copy is running
    };
    struct LateRun {
        uintptr_t begin;  // an address
        uintptr_t end;
        uintptr_t furthest;  // end of this run and those before it; runs may overlap
        size_t chunk;
    };

    // Memory of a device that a barrier owns.
    struct GuardedRun {
        uintptr_t begin;  // an address
        uintptr_t end;
        CopyStream* on;
    };

    [[nodiscard]] bool is_owned(Memory memory) const;
    void find_late();
    void find_devices();
    void stage_chunk(size_t index);
    // Makes the program's streams wait before they write to guarded memory.
    void lead_before(Memory write) noexcept;
    void wait_for_devices();
    void late_part_done() noexcept;
    void copy_late_chunk(size_t index) noexcept;
    void copy(const Chunk& chunk, When when, std::byte* to) const;
    void put_copies(Chunk& chunk, StagingPool::Slot& slot) const;
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
    std::vector<LateRun> late_runs_;    // by address
    std::vector<size_t> in_order_;      // the chunks in the order in which they are staged, if some are on devices
    std::vector<CopyStream*> devices_;  // of the first chunks, whose copies nothing guards,
    size_t unguarded_ = 0;              // which are so many
    std::vector<GuardedRun> guarded_;   // by address
    std::mutex mutex_;
    std::condition_variable filled_;
    // Guarded by mutex_: chunks whose late copy is not done; the copies of devices count as one more.
    size_t late_left_ = 0;
    std::vector<CopyStream*> to_lead_;  // guarded by mutex_; devices whose guarded memory nobody has announced to write
    size_t copying_ = 0;                // guarded by mutex_; chunks whose late copy is running
    bool closed_ = false;               // guarded by mutex_
    std::optional<Error> error_;        // guarded by mutex_; why staging stopped
};

}  // namespace tsr
