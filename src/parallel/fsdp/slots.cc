#include "parallel/fsdp/slots.hpp"

#include <algorithm>
#include <utility>

#include "base/page_size.hpp"

namespace tsr {

size_t WholeSlots::take(size_t size, std::optional<size_t> last) {
    std::optional<size_t> found;
    if (last && !slots_[*last].used) {
        found = last;
    } else {
        for (size_t s = 0; s < slots_.size(); ++s) {
            if (slots_[s].used || slots_[s].size < size) continue;
            if (!found || slots_[s].size < slots_[*found].size) found = s;
        }
    }
    if (!found) {
        found = slots_.size();
        const size_t pages = std::max<size_t>((size + page_size - 1) / page_size, 1);
        slots_.push_back({pages * page_size});
    }
    slots_[*found].used = true;
    return *found;
}

GradSlots::GradSlots(int in_flight, Allocate allocate, Await await)
    : in_flight_(static_cast<size_t>(in_flight)), allocate_(std::move(allocate)), await_(std::move(await)) {}

size_t GradSlots::take(size_t size) {
    std::optional<size_t> found;
    std::optional<size_t> largest;
    while (true) {
        for (size_t s = 0; s < slots_.size(); ++s) {
            const Slot& slot = slots_[s];
            if (slot.used) continue;
            if (!largest || slot.size > slots_[*largest].size) largest = s;
            if (slot.size >= size && (!found || slot.size < slots_[*found].size)) found = s;
        }
        if (found || reductions_.size() < in_flight_) break;
        await_oldest_reduction();
    }
    if (!found) {
        Slot slot;
        slot.size = size;
        slot.memory = largest ? slots_[*largest].memory : std::make_shared<GradMemory>();
        slot.allocation = allocate_(slot.memory, size);
        found = largest.value_or(slots_.size());
        if (!largest) slots_.emplace_back();
        slots_[*found] = std::move(slot);
    }
    slots_[*found].used = true;
    return *found;
}

std::byte* GradSlots::ready(size_t slot) {
    if (WorkPtr& allocation = slots_[slot].allocation) {
        await_(allocation);
        allocation = nullptr;
    }
    return data(slot);
}

void GradSlots::reduce(size_t slot, WorkPtr reduction) {
    slots_[slot].reduction = std::move(reduction);
    reductions_.push_back(slot);
}

void GradSlots::await_reductions() {
    while (!reductions_.empty()) await_oldest_reduction();
}

void GradSlots::await_oldest_reduction() {
    Slot& slot = slots_[reductions_.front()];
    await_(slot.reduction);
    reductions_.erase(reductions_.begin());
    slot.reduction = nullptr;
    slot.used = false;
}

}  // namespace tsr
