// Makes one state of those of all ranks, each of which may lack tensors that others have: the stages of a pipeline, or
// experts. Afterwards every rank's state names every tensor, with a layout that says which ranks hold it, so a save, a
// load and a gather work as with any other state.
#pragma once

#include "checkpoint/model/state.hpp"
#include "comm/peers.hpp"

namespace tsr {

// Collective. A tensor that every rank has, in the same layout over these ranks, stays as it is; of any other, only the
// parts that each rank itself holds count, so layouts may be of smaller groups. Changes all ranks' states or none.
// Throws MISMATCH, on every rank, if two ranks have different dtypes or shapes for a name, and INVALID_ARGUMENT if
// parts overlap without being equal.
void join_states(State& state, Peers& peers);

}  // namespace tsr
