// The ranks meet in one collective and want different things: who wants what, in words that are the same on every
// transport and, but for the first, on every rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/error.hpp"
#include "comm/request.hpp"

namespace tsr {

// What one rank said when it entered, for itself or for several: `ranks`, itself first.
struct Said {
    Operation operation;
    std::vector<int> ranks;
};

// The MISMATCH of rank `rank`, which is the first of one of `said`, about collective `sequence`; there are two different
// fingerprints at least.
[[nodiscard]] Error disagreement(int rank, uint64_t sequence, std::span<const Said> said);

}  // namespace tsr
