// The memory that units take in turn: whole parameters lie in slots of one pool, whole gradients in those of the other. A slot
// is one unit's or free. Which one a unit gets follows from the calls before alone, so that all ranks give out the same.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/work.hpp"
#include "parallel/fsdp/whole_copies.hpp"

namespace tsr {

class WholeSlots {
   public:
    // The slot `last` if it is free, else the smallest free one that holds `size` bytes, else a new one.
    [[nodiscard]] size_t take(size_t size, std::optional<size_t> last);
    void give_back(size_t slot) { slots_[slot].used = false; }
    // Shared with jobs in the queue.
    [[nodiscard]] const std::shared_ptr<WholeMemory>& memory(size_t slot) const { return slots_[slot].memory; }

   private:
    struct Slot {
        std::shared_ptr<WholeMemory> memory;
        bool used = false;
    };
    std::vector<Slot> slots_;
};

// Of a communicator's memory, which a job in its queue allocates.
struct GradMemory {
    std::shared_ptr<Buffer> buffer;
};

class GradSlots {
   public:
    // Queues the allocation of so many bytes in place of what `memory` holds.
    using Allocate = std::function<WorkPtr(std::shared_ptr<GradMemory> memory, size_t size)>;
    using Await = std::function<void(const WorkPtr& work)>;
    // At most `in_flight` slots are being reduced while another is to be had.
    GradSlots(int in_flight, Allocate allocate, Await await);

    // The smallest free slot of `size` bytes. If there is none, those being reduced are waited for while there are
    // `in_flight`; then the largest free one is made larger, or there is one more.
    [[nodiscard]] size_t take(size_t size);
    // Waits for its allocation.
    [[nodiscard]] std::byte* ready(size_t slot);
    [[nodiscard]] std::byte* data(size_t slot) const { return slots_[slot].memory->buffer->data(); }
    [[nodiscard]] const std::shared_ptr<GradMemory>& memory(size_t slot) const { return slots_[slot].memory; }
    // It is given back when `reduction` is done.
    void reduce(size_t slot, WorkPtr reduction);
    void await_reductions();
    void give_back(size_t slot) { slots_[slot].used = false; }

   private:
    struct Slot {
        size_t size = 0;
        std::shared_ptr<GradMemory> memory;
        WorkPtr allocation;  // until it is waited for
        bool used = false;
        WorkPtr reduction;
    };
    void await_oldest_reduction();

    const size_t in_flight_;
    const Allocate allocate_;
    const Await await_;
    std::vector<Slot> slots_;
    std::vector<size_t> reductions_;  // slots that are being reduced, the oldest first
};

}  // namespace tsr
