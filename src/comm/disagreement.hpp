// The error when ranks meet in one collective but issued different operations. The text is the same on every transport
// and, except for its rank prefix, on every rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/error.hpp"
#include "comm/request.hpp"

namespace tsr {

// The operation that one rank announced on entry, for itself or for several: `ranks`, itself first.
struct Said {
    Operation operation;
    std::vector<int> ranks;
};

// The MISMATCH of rank `rank`, which is the first rank of one of `said`, about collective `sequence`. `said` has at
// least two different fingerprints.
[[nodiscard]] Error disagreement(int rank, uint64_t sequence, std::span<const Said> said);

}  // namespace tsr
