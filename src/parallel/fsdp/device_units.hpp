// Units on a CUDA device. Each communicator has a stream there, beside the trainer's:
//
//     trainer's    optimizer . . . forward of u . forward of u+1 . . . backward of u+1 . backward of u . . . wait . optimizer
//                     \ event        / event        /                            \ event         / slots       / event
//     parameters       gather u . . gather u+1 . . .                              \             /             /
//     gradients                                                                    scatter u+1 . scatter u . .
//
// A gather or a scatter waits for all that the trainer's stream had when it was asked for: the last write of the shards, the
// last use of the slot, the gradients. The trainer's stream waits for it when the trainer needs it: never the host for the
// device, but where a unit moves to another slot. So slots bound the memory, however far the host runs ahead, and no
// operation can outlive the memory that it uses.
//
// All operations are launched by the trainer's thread, in the same order on all ranks, as NCCL needs it. What is unsharded is
// compared by the hosts (jobs of the communicator `hosts`), so that ranks that differ are named.
//
// The rows of several parameters are moved by one operation, in memory of the lane, and copied from or to the unit:
//
//     unit       [ parameter 0: rank 0 | rank 1 .. ][ parameter 1: rank 0 | rank 1 .. ]
//     lane       [ rank 0: parameter 0 | parameter 1 .. ][ rank 1: parameter 0 | parameter 1 .. ]
//
// An operation for each parameter costs more than these copies, even in a group of NCCL's.
//
// What a unit is gathered in and its gradients are reduced in may be another dtype than that of the shards: kernels convert, in
// the same streams (device_scatter.hpp has those after a reduction).
//
// A slot is pages of the device; each unit sees the slot that it is in at its own fixed addresses (DeviceRange).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/device.hpp"
#include "parallel/fsdp/device_lane.hpp"
#include "parallel/fsdp/device_scatter.hpp"
#include "parallel/fsdp/unit_place.hpp"

namespace tsr {

class DeviceUnits final : public UnitPlace {
   public:
    // Throws NO_MEMORY or CUDA.
    DeviceUnits(std::shared_ptr<const FsdpPlan> plan, Device device, ShardMemory shards);

    void connect(Communicator& comm, int group, int place, const ScatterOptions& options,
                 std::shared_ptr<GradParts> parts) override;
    void await(const Work& work, Deadline deadline) override;
    [[nodiscard]] WorkPtr unshard(size_t unit, SlotId slot, From from) override;
    void show(size_t unit, SlotId slot) override;
    void hide(size_t unit) override;
    [[nodiscard]] std::byte* data(size_t unit) const override { return units_[unit].range->data(); }
    [[nodiscard]] int prepare_to_keep(size_t unit, int ranks) override;
    void keep(size_t unit, SlotId slot) override;
    [[nodiscard]] WorkPtr allocate(const std::shared_ptr<GradMemory>& memory, size_t size) override;
    [[nodiscard]] WorkPtr reduce(size_t unit, const std::shared_ptr<GradMemory>& memory, Into into) override;
    [[nodiscard]] WorkPtr reduce_partly(size_t unit, const std::shared_ptr<GradMemory>& memory) override;
    void forget_partial() override { scatter_->forget_partial(); }
    [[nodiscard]] bool sees_memory() const override { return false; }
    [[nodiscard]] WorkPtr share(const std::shared_ptr<std::vector<uint8_t>>& flags) override;
    void zero(std::byte* data, size_t size) override;
    void require_kernels_for(const char* what) const override;
    void set_stream(StreamHandle stream) override;
    void check() override;
    void end(bool is_idle) noexcept override;

   private:
    // Jobs of the hosts use them too.
    struct Lanes {
        std::shared_ptr<Communicator> hosts;
        DeviceLane gathers;
        DeviceLane scatters;
        DeviceLane replicas;                // not open: no other rank holds the same shards
        std::map<int, DeviceLane> keepers;  // by number of parts

        void each(FunctionRef<void(DeviceLane&)> use);
        void abort(const std::string& reason);  // any thread
        // Why they failed; `error` if nobody knows better.
        [[nodiscard]] Error cause_of(const Error& error);
    };
    // What a unit keeps from its forward to its backward: one of `parts` equal parts of each piece.
    struct Kept {
        int parts = 0;
        std::shared_ptr<std::byte> memory;  // null before it is kept for the first time
    };
    struct Unit {
        std::unique_ptr<DeviceRange> range;
        std::optional<size_t> slot;                   // that it shows
        std::shared_ptr<const DeviceEvent> released;  // after its last use there
        WorkPtr gather;                               // until it is shown
        Kept kept;
    };

    // Runs `body`; if it fails, aborts what other ranks wait for.
    template <class Body>
    auto together(Body&& body);
    void move_to(Unit& unit, SlotId slot);
    // Of this rank, and of all: a piece that is gathered.
    struct Moved {
        const FsdpPiece* piece;
        std::byte* part;
        std::byte* whole;
        size_t size;    // of the part in the unit
        bool converts;  // the part has another dtype than the unit
    };
    [[nodiscard]] size_t room_for(size_t unit, int parts) const;
    [[nodiscard]] std::vector<Moved> moved(size_t unit, From from) const;
    [[nodiscard]] WorkPtr gather_directly(std::span<const Moved> pieces, DeviceLane& lane);
    [[nodiscard]] WorkPtr gather_together(std::span<const Moved> pieces, DeviceLane& lane);
    [[nodiscard]] WorkPtr gather(size_t unit, From from);
    [[nodiscard]] WorkPtr submit_job(std::function<void()> job);
    [[nodiscard]] WorkPtr compare(size_t unit, SlotId slot);
    [[nodiscard]] Tensor bytes(std::byte* data, size_t size) const;
    [[nodiscard]] size_t part_size(const FsdpPiece& piece, int parts) const;
    [[nodiscard]] Deadline deadline() const;

    const std::shared_ptr<const FsdpPlan> plan_;
    const Device device_;
    DeviceApi& api_;
    const ShardMemory shards_;
    StreamHandle stream_ = nullptr;             // the trainer's
    std::vector<std::shared_ptr<void>> slots_;  // their pages, before the units that show them go
    std::vector<Unit> units_;
    std::vector<std::shared_ptr<Buffer>> spare_;  // memory of gradients that no slot has
    std::unique_ptr<Lanes> lanes_;
    std::optional<DeviceScatter> scatter_;
    WorkPtr last_job_;  // of the hosts
};

}  // namespace tsr
