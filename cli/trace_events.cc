#include "trace_events.hpp"

#include <utility>

namespace tsr::cli {

Json::Object trace_event(const char* phase, int rank, int lane, std::string_view name) {
    return {{"ph", phase}, {"pid", rank}, {"tid", lane}, {"name", name}};
}

Json trace_name(const char* what, int rank, int lane, const std::string& name) {
    Json::Object of = trace_event("M", rank, lane, what);
    of.push_back({"args", Json::Object{{"name", name}}});
    return Json(std::move(of));
}

std::string trace_text(Json::Array events) {
    return Json(Json::Object{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}).dump() + "\n";
}

}  // namespace tsr::cli
