#include "parallel/fsdp/host_units.hpp"

#include <utility>

namespace tsr {

HostUnits::HostUnits(std::shared_ptr<const FsdpPlan> plan, ShardMemory shards)
    : plan_(std::move(plan)), shards_(std::move(shards)) {
    for (const UnitPlan& unit : plan_->units) units_.push_back({AddressRange(unit.whole_size), nullptr});
}

void HostUnits::connect(Communicator& comm, int group, int place, const ScatterOptions& options,
                        std::shared_ptr<GradParts> parts) {
    copies_ = std::make_shared<WholeCopies>(own_communicator(comm, "parameters", group, Reach::cpu), plan_);
    const bool has_replicas = plan_->ranks < comm.world_size();
    const auto replicas = has_replicas ? own_communicator(comm, "replicas", place, Reach::cpu) : nullptr;
    scatter_ = std::make_shared<GradientScatter>(own_communicator(comm, "gradients", group, Reach::cpu), replicas,
                                                 plan_, options, shards_.grads);
    scatter_->set_parts(std::move(parts));
}

const std::shared_ptr<WholeMemory>& HostUnits::memory_of(SlotId slot) {
    for (size_t s = slots_.size(); s <= slot.number; ++s) slots_.push_back(std::make_shared<WholeMemory>());
    slots_[slot.number]->size = slot.size;
    return slots_[slot.number];
}

WorkPtr HostUnits::unshard(size_t unit, SlotId slot, From from) {
    return copies_->comm()->submit_job(
        [copies = copies_, shards = shards_.params, unit, slot = slot.number, memory = memory_of(slot),
         kept = from == From::kept ? units_[unit].kept : nullptr,
         is_left = from == From::left] { copies->make_whole(unit, slot, *memory, shards.get(), kept.get(), is_left); });
}

void HostUnits::show(size_t unit, SlotId slot) { units_[unit].range.show(memory_of(slot)->memory.get()); }

void HostUnits::hide([[maybe_unused]] size_t unit) {
#ifndef NDEBUG
    units_[unit].range.hide();  // catches uses of an invalid view
#endif
}

int HostUnits::prepare_to_keep(size_t unit, int ranks) {
    const int hosts = copies_->prepare_to_keep(ranks);
    if (hosts > 1) units_[unit].kept = std::make_shared<KeptPart>(KeptPart{hosts, {}});
    return hosts;
}

void HostUnits::keep(size_t unit, SlotId slot) {
    (void)copies_->comm()->submit_job([copies = copies_, unit, memory = memory_of(slot), part = units_[unit].kept] {
        copies->keep(unit, *memory, *part);
    });
}

WorkPtr HostUnits::allocate(const std::shared_ptr<GradMemory>& memory, size_t size) {
    return scatter_->comm()->submit_job([scatter = scatter_, memory, size] {
        memory->buffer.reset();
        memory->buffer = scatter->comm()->allocate(size);
    });
}

WorkPtr HostUnits::reduce(size_t unit, const std::shared_ptr<GradMemory>& memory, Into into) {
    return scatter_->comm()->submit_job([scatter = scatter_, unit, memory, add = into == Into::old_grads] {
        scatter->reduce(unit, memory->buffer->data(), add);
    });
}

WorkPtr HostUnits::reduce_partly(size_t unit, const std::shared_ptr<GradMemory>& memory) {
    return scatter_->comm()->submit_job(
        [scatter = scatter_, unit, memory] { scatter->reduce_partly(unit, memory->buffer->data()); });
}

WorkPtr HostUnits::share(const std::shared_ptr<std::vector<uint8_t>>& flags) {
    return scatter_->comm()->submit_job([scatter = scatter_, flags] { scatter->share(*flags); });
}

}  // namespace tsr
