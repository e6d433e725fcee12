// Gradients of which each rank of a tensor-parallel group has a part: their sum over the group is the gradient.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "device/device.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// Sums tensors over the ranks, in place: one operation for each dtype, on a device in the order of the stream. Collective.
void sum_over_ranks(Communicator& comm, std::span<const Tensor> tensors, StreamHandle stream = nullptr);

// What a model over slices (DDP, FSDP) sums before it reduces gradients over ranks with other data. It has a communicator
// of its own, which jobs use while the trainer computes.
class GradParts {
   public:
    // `sums` has a flag for each of the model's parameters.
    GradParts(std::shared_ptr<Communicator> comm, std::vector<bool> sums)
        : comm_(std::move(comm)), sums_(std::move(sums)) {}

    [[nodiscard]] bool is_summed(size_t param) const { return sums_[param]; }
    void sum(std::span<const Tensor> grads) const { sum_over_ranks(*comm_, grads); }

   private:
    std::shared_ptr<Communicator> comm_;
    std::vector<bool> sums_;
};

}  // namespace tsr
