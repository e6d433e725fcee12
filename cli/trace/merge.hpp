// The operations of all ranks as one trace for Perfetto (ui.perfetto.dev) or chrome://tracing.
#pragma once

#include <string>

#include "trace/flights.hpp"

namespace tsr::cli {

// One process per rank, and one lane per operation in flight: overlapping operations are on separate lanes.
[[nodiscard]] std::string trace_of(const Flights& flights);

}  // namespace tsr::cli
