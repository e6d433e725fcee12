// Units on the CPU. The ranks of a host share one unsharded copy of each (whole_copies.hpp), which each unit sees at its
// own fixed addresses (address_range.hpp); gradients are reduced into the shards from memory that the ranks share
// (gradient_scatter.hpp). Both work in jobs of communicators of their own, concurrently.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "parallel/fsdp/address_range.hpp"
#include "parallel/fsdp/gradient_scatter.hpp"
#include "parallel/fsdp/unit_place.hpp"
#include "parallel/fsdp/whole_copies.hpp"

namespace tsr {

class HostUnits final : public UnitPlace {
   public:
    // Throws NO_MEMORY.
    HostUnits(std::shared_ptr<const FsdpPlan> plan, ShardMemory shards);

    void connect(Communicator& comm, int group, int place, const ScatterOptions& options,
                 std::shared_ptr<GradParts> parts) override;
    void await(const Work& work, Deadline deadline) override { work.wait(deadline); }
    [[nodiscard]] WorkPtr unshard(size_t unit, SlotId slot, From from) override;
    void show(size_t unit, SlotId slot) override;
    void hide(size_t unit) override;
    [[nodiscard]] std::byte* data(size_t unit) const override { return units_[unit].range.data(); }
    [[nodiscard]] int prepare_to_keep(size_t unit, int ranks) override;
    void keep(size_t unit, SlotId slot) override;
    [[nodiscard]] WorkPtr allocate(const std::shared_ptr<GradMemory>& memory, size_t size) override;
    [[nodiscard]] WorkPtr reduce(size_t unit, const std::shared_ptr<GradMemory>& memory, Into into) override;
    [[nodiscard]] WorkPtr reduce_partly(size_t unit, const std::shared_ptr<GradMemory>& memory) override;
    void forget_partial() override { scatter_->forget_partial(); }
    [[nodiscard]] bool sees_memory() const override { return true; }
    [[nodiscard]] WorkPtr share(const std::shared_ptr<std::vector<uint8_t>>& flags) override;
    void zero(std::byte* data, size_t size) override { std::memset(data, 0, size); }
    void require_kernels_for(const char* /*what*/) const override {}
    void set_stream(StreamHandle stream) override { cpu_device().check_stream(stream); }
    void check() override {}                         // calls find the failure of a job in its communicator
    void end(bool /*is_idle*/) noexcept override {}  // queued jobs use only what they share with this object

   private:
    struct Unit {
        AddressRange range;
        std::shared_ptr<KeptPart> kept;  // the part kept by this host, if several keep it
    };
    [[nodiscard]] const std::shared_ptr<WholeMemory>& memory_of(SlotId slot);

    const std::shared_ptr<const FsdpPlan> plan_;
    const ShardMemory shards_;
    std::vector<Unit> units_;
    std::vector<std::shared_ptr<WholeMemory>> slots_;  // shared with jobs in the queue
    std::shared_ptr<WholeCopies> copies_;
    std::shared_ptr<GradientScatter> scatter_;
};

}  // namespace tsr
