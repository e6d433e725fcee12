// A resolved configuration as JSON, for engines of other libraries and for programs that show it.
#pragma once

#include "base/json.hpp"
#include "engine/batch.hpp"
#include "engine/config.hpp"

namespace tsr {

// The members are those of docs/ENGINE.md.
[[nodiscard]] Json to_json(const EngineConfig& config, const BatchSizes& batch, int ranks);

}  // namespace tsr
