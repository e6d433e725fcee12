// Reduces the gradients of a unit into the ranks' shards on a device, with what the CPU does (gradient_scatter.hpp) in two
// streams, by kernels and NCCL:
//
//     gradients     divide . reduce-scatter . add what was reduced before \ event
//     replicas                                                              all-reduce . divide, convert, add to the shards
//
// Without replicas the shards are written on the first one. A chunk that needs a conversion or is added is reduced in place,
// within the unit's gradients, so that this needs no memory. Used by the trainer's thread.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "parallel/fsdp/device_lane.hpp"
#include "parallel/fsdp/unit_place.hpp"
#include "parallel/fsdp/unit_plan.hpp"

namespace tsr {

class DeviceScatter {
   public:
    // `shards`: memory for the gradients of all shards. `replicas` is not open if no other rank holds the same shards.
    // Throws NO_MEMORY.
    DeviceScatter(std::shared_ptr<const FsdpPlan> plan, Device device, const ScatterOptions& options, std::byte* shards,
                  DeviceLane& lane, DeviceLane& replicas);

    // As those of GradientScatter, after what the lane's stream has. The work is done when `grads` are free again and the
    // shards written; null: there was nothing to do. Throw NO_MEMORY, CUDA, or why the lane has failed.
    [[nodiscard]] WorkPtr reduce(size_t unit, std::byte* grads, bool add);
    [[nodiscard]] WorkPtr reduce_partly(size_t unit, std::byte* grads);
    void forget_partial();

   private:
    struct Part {
        const FsdpPiece* piece;
        Tensor whole;
        Tensor reduced;  // this rank's chunk, here or in its shard
        Tensor shard;
    };
    // Sums still to be reduced over the replicas, which later backwards add to. The memory stays: to free it would make the
    // host wait for the device.
    struct Partial {
        std::shared_ptr<std::byte> memory;  // null before the first one
        size_t size = 0;
        bool is_set = false;
    };

    [[nodiscard]] std::vector<Part> parts_of(size_t unit, std::byte* grads) const;
    [[nodiscard]] static std::vector<std::byte*> places_in(const Partial& partial, const std::vector<Part>& parts);
    void scatter(const std::vector<Part>& parts);
    void scatter_together(const std::vector<Part>& parts);
    void reduce_scatter(std::span<const Tensor> wholes, std::span<const Tensor> reduced);
    void reduce_over_replicas(const std::vector<Part>& parts);
    [[nodiscard]] WorkPtr store(const std::vector<Part>& parts, bool add, DeviceLane& lane);

    const std::shared_ptr<const FsdpPlan> plan_;
    const Device device_;
    DeviceApi& api_;
    const ScatterOptions options_;
    std::byte* const shards_;
    DeviceLane& lane_;
    DeviceLane& replicas_;
    std::vector<Partial> partial_;  // by unit
};

}  // namespace tsr
