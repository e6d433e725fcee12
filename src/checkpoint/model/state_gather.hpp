// A whole tensor of a state of which each rank holds a part, on one rank or on all: a full state, tensor by tensor, without
// memory for more than one of them.
#pragma once

#include <string_view>

#include "base/function_ref.hpp"
#include "checkpoint/model/state.hpp"
#include "comm/communicator.hpp"

namespace tsr {

// Collective: all ranks name the same tensor of states in which it is the same. `whole`, called where the tensor is
// gathered, gives memory of its dtype and shape, or throws. `root` -1: on all ranks. Each part is sent by the lowest rank that holds it. NOT_FOUND,
// INVALID_ARGUMENT: on the rank that is wrong, and MISMATCH, which names the tensor, on the others.
void gather_tensor(Communicator& comm, const State& state, std::string_view name, int root,
                   FunctionRef<Tensor()> whole);

}  // namespace tsr
