// Reduces the gradients of a unit into the ranks' shards, directly from each rank's memory into the owner's shard if
// the dtypes allow it. Everything except the constructor and allocate() runs in jobs of its communicator's progress
// thread, one after another.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "parallel/fsdp/unit_place.hpp"
#include "parallel/fsdp/unit_plan.hpp"
#include "parallel/tensor/grad_parts.hpp"

namespace tsr {

class GradientScatter {
   public:
    // This object owns the communicators: `comm` of the ranks that shard a parameter, and `replicas` of the ranks that
    // hold the same shard (null: no other rank does). `shards`: memory for the gradients of all shards.
    GradientScatter(std::shared_ptr<Communicator> comm, std::shared_ptr<Communicator> replicas,
                    std::shared_ptr<const FsdpPlan> plan, ScatterOptions options, std::shared_ptr<std::byte> shards);

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return comm_; }
    // Writes the sum (or average) of the ranks' `grads` of a unit into the shards, or adds it if `add` is set. May
    // change `grads`.
    void reduce(size_t unit, std::byte* grads, bool add);
    // The first half of reduce(): keeps the sum over the ranks that shard the parameters; later calls add to it, until
    // a reduce() includes it.
    void reduce_partly(size_t unit, std::byte* grads);
    // What is summed over a tensor-parallel group before the reduction; may be null.
    void set_parts(std::shared_ptr<GradParts> parts) { tp_parts_ = std::move(parts); }
    // Replaces the flags by the maximum over all ranks.
    void share(std::vector<uint8_t>& flags);
    // Between steps.
    void forget_partial();
    // Bytes used besides the gradients and the shards: none until a reduction converts, adds or is partial.
    [[nodiscard]] size_t scratch_size() const { return scratch_.size(); }

   private:
    struct Part {
        const FsdpPiece* piece;
        Tensor whole;
        Tensor reduced;  // this rank's chunk
    };
    [[nodiscard]] std::vector<Part> parts_of(size_t unit, std::byte* grads) const;
    void sum_parts(size_t unit, std::byte* grads) const;
    static void place(std::vector<Part>& parts, std::vector<std::byte>& memory);
    [[nodiscard]] Tensor shard_of(const Part& part) const;
    void scatter(const std::vector<Part>& parts);
    void reduce_over_replicas(const std::vector<Part>& parts);
    void store(const Part& part, bool add) const;

    const std::shared_ptr<Communicator> comm_;
    const std::shared_ptr<Communicator> replicas_;
    const std::shared_ptr<const FsdpPlan> plan_;
    const ScatterOptions options_;
    const std::shared_ptr<std::byte> shards_;
    std::shared_ptr<GradParts> tp_parts_;
    std::vector<std::byte> scratch_;  // chunks in the reduction dtype that are not reduced directly into the shards
    std::vector<std::vector<std::byte>> partial_;  // per unit: sums still to be reduced over the replicas
};

}  // namespace tsr
