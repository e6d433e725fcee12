// Do all ranks say the same? Asked before anything is allocated or sent by what they say: a model's parameters, a mesh.
#pragma once

#include <string>
#include <vector>

#include "comm/communicator.hpp"

namespace tsr {

// `lines` describe what this rank wants, each a text without NUL. Collective: 40 bytes a rank when all
// agree; otherwise every rank throws the same MISMATCH, which names the first line in which the lowest differing rank
// differs from rank 0.
void check_same_on_all_ranks(Communicator& comm, const std::vector<std::string>& lines, const std::string& what);

}  // namespace tsr
