// The layout of a tensor that no placements describe and of which each rank knows only its own boxes: the ranks
// exchange their boxes, and nothing else, and end up with the same layout.
#pragma once

#include <memory>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/communicator.hpp"
#include "tensor/layout.hpp"

namespace tsr {

struct OwnBoxes {
    Dims shape;  // of the whole tensor, the same on every rank
    std::vector<Box> boxes;
};

// Collective. All ranks get the same error: the one that `own` throws on a rank, INVALID_ARGUMENT for a box outside of
// the tensor or two boxes that partly overlap, MISMATCH for different shapes. Each names the ranks.
[[nodiscard]] Layout gather_layout(const std::shared_ptr<Communicator>& comm, FunctionRef<OwnBoxes()> own);

}  // namespace tsr
