// The ranks meet in one collective and want different things: who wants what, in words that are the same on every
// transport and, but for the first, on every rank.
#pragma once

#include <cstdint>
#include <span>

#include "base/error.hpp"
#include "comm/request.hpp"

namespace tsr {

// What one rank said when it entered.
struct Said {
    uint64_t fingerprint = 0;
    Operation operation;
};

// The MISMATCH of rank `rank` about collective `sequence`; `said` by rank, with two different fingerprints at least.
[[nodiscard]] Error disagreement(int rank, uint64_t sequence, std::span<const Said> said);

}  // namespace tsr
