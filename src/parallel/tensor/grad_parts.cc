#include "parallel/tensor/grad_parts.hpp"

#include <algorithm>

namespace tsr {

void sum_over_ranks(Communicator& comm, std::span<const Tensor> tensors, StreamHandle stream) {
    std::vector<std::vector<Tensor>> lists;  // one for each dtype, in the order of the tensors
    for (const Tensor& tensor : tensors) {
        const auto same = std::ranges::find_if(lists, [&](const auto& list) { return list[0].dtype == tensor.dtype; });
        (same == lists.end() ? lists.emplace_back() : *same).push_back(tensor);
    }
    for (const std::vector<Tensor>& list : lists) {
        comm.run({.collective = Collective::all_reduce,
                  .inputs = {},
                  .outputs = list,
                  .op = ReduceOp::sum,
                  .label = "parts of gradients",
                  .stream = stream});
    }
}

}  // namespace tsr
