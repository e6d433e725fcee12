// Checks that ranks which hold the same part of a tensor, or the same value, hold the same bytes. A save writes each
// part once, in blocks from several ranks, so replicas that differ would be saved as a mixture that no rank ever held.
// Bytes are compared: -0.0 differs from 0.0, and a NaN equals only a NaN of the same bits. Per-rank values
// (rank/<r>/...) are skipped.
#pragma once

#include <cstdint>
#include <optional>

#include "base/error.hpp"
#include "checkpoint/model/plan.hpp"
#include "checkpoint/model/state.hpp"
#include "comm/peers.hpp"

namespace tsr {

// Whether a save checks this.
enum class CheckReplicas : int32_t { no, yes };

// Collective, between ranks whose states have the same structure. Reads the parts that this rank shares with another on
// a few threads and sends 8 bytes; only after a difference, one checksum per part. Returns the same error on every
// rank: a MISMATCH that names the first tensor or value that differs and the ranks outside the majority, or the error
// that stopped one rank. Tensors on devices are read through `copies`. `aliases`, the same on every rank, are not read twice.
[[nodiscard]] std::optional<Error> compare_replicas(Peers& peers, const State& state, const Values& values,
                                                    const Aliases& aliases, CopyStreams& copies);

}  // namespace tsr
