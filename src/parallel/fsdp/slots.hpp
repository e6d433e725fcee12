// Memory that units use in turn: unsharded parameters are in slots of one pool, unsharded gradients in slots of
// another. A slot belongs to one unit or is free. Which slot a unit gets depends only on earlier calls, so all ranks
// choose the same.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/work.hpp"

namespace tsr {

// A slot for unsharded parameters.
struct SlotId {
    size_t number = 0;
    size_t size = 0;  // in bytes: pages
};

class WholeSlots {
   public:
    // Returns the slot `last` if it is free, otherwise the smallest free slot of at least `size` bytes, otherwise a new
    // one.
    [[nodiscard]] size_t take(size_t size, std::optional<size_t> last);
    void give_back(size_t slot) { slots_[slot].used = false; }
    [[nodiscard]] SlotId id(size_t slot) const { return {slot, slots_[slot].size}; }

   private:
    struct Slot {
        size_t size = 0;
        bool used = false;
    };
    std::vector<Slot> slots_;
};

// On the CPU, memory of a communicator, allocated by a job in its queue.
struct GradMemory {
    std::shared_ptr<Buffer> buffer;
};

class GradSlots {
   public:
    // Queues the allocation of `size` bytes to replace what `memory` holds. May return null: it is done.
    using Allocate = std::function<WorkPtr(std::shared_ptr<GradMemory> memory, size_t size)>;
    using Await = std::function<void(const WorkPtr& work)>;
    // At most `in_flight` slots are being reduced when another is taken.
    GradSlots(int in_flight, Allocate allocate, Await await);

    // Returns the smallest free slot of at least `size` bytes. If there is none, it waits for reductions while
    // `in_flight` are running, then enlarges the largest free slot or adds one.
    [[nodiscard]] size_t take(size_t size);
    // Waits for its allocation.
    [[nodiscard]] std::byte* ready(size_t slot);
    [[nodiscard]] std::byte* data(size_t slot) const { return slots_[slot].memory->buffer->data(); }
    [[nodiscard]] const std::shared_ptr<GradMemory>& memory(size_t slot) const { return slots_[slot].memory; }
    // The slot is returned when `reduction` is done.
    void reduce(size_t slot, WorkPtr reduction);
    void await_reductions();
    void give_back(size_t slot) { slots_[slot].used = false; }

   private:
    struct Slot {
        size_t size = 0;
        std::shared_ptr<GradMemory> memory;
        WorkPtr allocation;  // until it has been waited for
        bool used = false;
        WorkPtr reduction;
    };
    void await_oldest_reduction();

    const size_t in_flight_;
    const Allocate allocate_;
    const Await await_;
    std::vector<Slot> slots_;
    std::vector<size_t> reductions_;  // slots being reduced, oldest first
};

}  // namespace tsr
