// Whether ranks that hold the same part of a tensor, or the same value, hold the same bytes of it. A save writes each part
// once, by blocks of several ranks: of replicas that differ it makes a mixture that no rank ever had. Bytes are compared, so
// that -0.0 is not 0.0, and a NaN equals one of the same bits alone. Values of one rank (rank/<r>/...) are its own affair.
#pragma once

#include <cstdint>
#include <optional>

#include "base/error.hpp"
#include "checkpoint/model/plan.hpp"
#include "checkpoint/model/state.hpp"
#include "comm/peers.hpp"

namespace tsr {

// Whether a save does so.
enum class CheckReplicas : int32_t { no, yes };

// Collective, between ranks whose states have the same structure. Reads what this rank and another hold on a few threads,
// and sends 8 bytes; only where there is a difference, a checksum a part. Returns the same error on every rank: MISMATCH, which
// names the first tensor or value that differs and whose bytes are not those of most, or what ended this on one of them.
// `aliases`, the same on every rank, are not read twice.
[[nodiscard]] std::optional<Error> compare_replicas(Peers& peers, const State& state, const Values& values,
                                                    const Aliases& aliases);

}  // namespace tsr
