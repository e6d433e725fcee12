// Gathers a sharded tensor of a state on one rank or on all ranks: a full state, tensor by tensor, with memory for one
// tensor at a time.
#pragma once

#include <string_view>

#include "base/function_ref.hpp"
#include "checkpoint/model/state.hpp"
#include "comm/communicator.hpp"

namespace tsr {

// Collective: all ranks name the same tensor, which must be the same in all their states. `whole`, called where the
// tensor is gathered, returns memory of its dtype and shape, or throws. `root` -1: on all ranks. Each part is sent by
// the lowest rank that holds it. Throws NOT_FOUND or INVALID_ARGUMENT on the rank at fault, and MISMATCH, naming the
// tensor, on the others.
void gather_tensor(Communicator& comm, const State& state, std::string_view name, int root,
                   FunctionRef<Tensor()> whole);

}  // namespace tsr
