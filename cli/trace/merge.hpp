// The operations of all ranks as one trace for Perfetto (ui.perfetto.dev) or chrome://tracing.
#pragma once

#include <string>

#include "trace/flights.hpp"

namespace tsr::cli {

// A process a rank, a lane an operation in flight: those that overlap lie on lanes of their own.
[[nodiscard]] std::string trace_of(const Flights& flights);

}  // namespace tsr::cli
