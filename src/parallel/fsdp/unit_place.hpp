// Where the units of a model are unsharded, and where their gradients are reduced: what FSDP does in another way for
// parameters on the CPU (host_units.hpp) and on a device (device_units.hpp). Fsdp decides when, and in which memory;
// this does it.
//
// What a call begins goes on in the background, and await() takes its work. Used by the trainer's thread. All ranks make the
// same calls in the same order. An error of a call, or of its work, makes the model unusable on all ranks, unless it is
// INTERRUPTED: then the call has done nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/work.hpp"
#include "device/device.hpp"
#include "parallel/fsdp/slots.hpp"
#include "parallel/fsdp/unit_plan.hpp"
#include "parallel/tensor/grad_parts.hpp"

namespace tsr {

// How reductions are made. The same for all units.
struct ScatterOptions {
    ReduceOp op = ReduceOp::avg;
    // Each rank divides its gradients by this first; the remaining factor of the average (or sum) is applied to the
    // shards.
    double pre_divide = 1;
};

// The memory that the place works on, which is there before the ranks connect.
struct ShardMemory {
    std::shared_ptr<std::byte> params;
    std::shared_ptr<std::byte> grads;
};

class UnitPlace {
   public:
    virtual ~UnitPlace() = default;

    // Collective over `comm`: splits off what it needs. Ranks of one `group` shard the parameters, those with the same
    // place in their group hold the same shard. `parts`: what is summed over a tensor-parallel group before a reduction;
    // may be null.
    virtual void connect(Communicator& comm, int group, int place, const ScatterOptions& options,
                         std::shared_ptr<GradParts> parts) = 0;
    // Returns when the work is done; on a device, when the trainer's stream will wait for that.
    virtual void await(const Work& work, Deadline deadline) = 0;

    // --- unsharded parameters

    // Begins to fill a slot with a unit: from the shards, from what was kept of it, or from what is left there, unless a
    // shard has changed since.
    enum class From { shards, kept, left };
    [[nodiscard]] virtual WorkPtr unshard(size_t unit, SlotId slot, From from) = 0;
    // After that work: the trainer may read the unit at data().
    virtual void show(size_t unit, SlotId slot) = 0;
    // The trainer has put the last reader of the unit on its stream.
    virtual void hide(size_t unit) = 0;
    [[nodiscard]] virtual std::byte* data(size_t unit) const = 0;

    // How many parts there are of a unit that every `ranks` consecutive ranks keep. 1: each has all of it. 0: nothing is
    // kept. Collective.
    [[nodiscard]] virtual int prepare_to_keep(size_t unit, int ranks) = 0;
    // Keeps this rank's part of a unit that is unsharded.
    virtual void keep(size_t unit, SlotId slot) = 0;

    // --- gradients

    // Replaces what `memory` holds by `size` bytes. Null: it is done.
    [[nodiscard]] virtual WorkPtr allocate(const std::shared_ptr<GradMemory>& memory, size_t size) = 0;
    // Into the shards: replaces their gradients or adds to them.
    enum class Into { new_grads, old_grads };
    [[nodiscard]] virtual WorkPtr reduce(size_t unit, const std::shared_ptr<GradMemory>& memory, Into into) = 0;
    // Into sums that a later reduce() includes.
    [[nodiscard]] virtual WorkPtr reduce_partly(size_t unit, const std::shared_ptr<GradMemory>& memory) = 0;
    virtual void forget_partial() = 0;
    // Whether the host can look at gradients and shards, and notice which of them were written.
    [[nodiscard]] virtual bool sees_memory() const = 0;
    // In the order of the trainer's accesses.
    virtual void zero(std::byte* data, size_t size) = 0;

    // Replaces the flags by their maximum over all ranks.
    [[nodiscard]] virtual WorkPtr share(const std::shared_ptr<std::vector<uint8_t>>& flags) = 0;

    // Throws UNSUPPORTED if this takes kernels that the device lacks: "accumulation in the shards".
    virtual void require_kernels_for(const char* what) const = 0;
    // The device's stream of the trainer, which goes on after the former one.
    virtual void set_stream(StreamHandle stream) = 0;
    // Throws what has failed since in the background, as far as it is known.
    virtual void check() = 0;
    // The model ends. If it is idle, the ranks have all made the same calls, and what is in flight ends by itself.
    virtual void end(bool is_idle) noexcept = 0;
};

// A communicator of the ranks with the same color, which is aborted together with `comm`; for tensors on the CPU alone, or
// wherever `comm` reaches.
enum class Reach { cpu, all };
[[nodiscard]] std::shared_ptr<Communicator> own_communicator(Communicator& comm, const std::string& what, int color,
                                                             Reach reach);

// MISMATCH: two ranks unshard different units, or the same while others are unsharded.
[[nodiscard]] Error unshards_another(const FsdpPlan& plan, int rank, size_t unit, int peer, size_t theirs);

}  // namespace tsr
