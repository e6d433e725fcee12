// Traces in the JSON form that ui.perfetto.dev and chrome://tracing read: a process per rank, with lanes.
#pragma once

#include <string>
#include <string_view>

#include "base/json.hpp"

namespace tsr::cli {

// An event of the lane, without its times: "X" is an interval, "M" a name.
[[nodiscard]] Json::Object trace_event(const char* phase, int rank, int lane, std::string_view name);
// `what`: "process_name" or "thread_name".
[[nodiscard]] Json trace_name(const char* what, int rank, int lane, const std::string& name);
[[nodiscard]] std::string trace_text(Json::Array events);

}  // namespace tsr::cli
