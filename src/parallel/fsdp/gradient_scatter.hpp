// Reduces the gradients of a unit into the ranks' shards: straight from each rank's memory into the owner's shard where
// dtypes allow it. Everything but the constructor and allocate() runs in jobs of its communicator's progress thread, one
// after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "parallel/fsdp/unit_plan.hpp"

namespace tsr {

struct ScatterOptions {
    ReduceOp op = ReduceOp::avg;
    // Each rank divides its gradients by this first; what is left of the average (or sum) is made up for in the shards.
    double pre_divide = 1;
};

class GradientScatter {
   public:
    // The communicators belong to this object: of the ranks among which a parameter is cut, and of those that hold the same
    // shard (null: nobody else does). `shards`: memory for the gradients of all shards.
    GradientScatter(std::shared_ptr<Communicator> comm, std::shared_ptr<Communicator> replicas,
                    std::shared_ptr<const FsdpPlan> plan, ScatterOptions options, std::shared_ptr<std::byte> shards);

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return comm_; }
    // Leaves the sum (or average) of the ranks' `grads` of a unit, which it may change, in the shards; `add`: in addition to
    // what is there.
    void reduce(size_t unit, std::byte* grads, bool add);
    // The first half of that: the sum over the ranks among which parameters are cut is kept, and added to by the next
    // ones, until a reduce() takes it along.
    void reduce_partly(size_t unit, std::byte* grads);
    // Leaves the largest of all ranks' flags in them.
    void share(std::vector<uint8_t>& flags);
    // Between steps.
    void forget_partial();
    // Bytes beside the gradients and the shards: none until a reduction converts, adds or is to be gone on with.
    [[nodiscard]] size_t scratch_size() const { return scratch_.size(); }

   private:
    struct Part {
        const FsdpPiece* piece;
        Tensor whole;
        Tensor reduced;  // this rank's chunk
    };
    [[nodiscard]] std::vector<Part> parts_of(size_t unit, std::byte* grads) const;
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
    std::vector<std::byte> scratch_;  // chunks in the dtype of reduction that are not straight in the shards
    std::vector<std::vector<std::byte>> partial_;  // of each unit: sums that are yet to be reduced over the replicas
};

}  // namespace tsr
