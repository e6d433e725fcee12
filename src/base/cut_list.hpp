// Cuts long lists in messages (one line per entry): one rank reports the complete list, the others only its beginning,
// so that a terminal shows it once. Readers of messages use shown_of() to find where a list was cut.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace tsr {

// `shown`, followed by a line that `rank` has the full list, with `left` more lines.
inline std::string cut_list(std::string_view shown, int64_t left, int rank) {
    return fmt::format("{}\n  and {} more lines; rank {} has the full list", shown, left, rank);
}

// The part of `text` that a cut list shows; all of `text` if it was not cut.
inline std::string_view shown_of(std::string_view text) {
    const size_t last = text.rfind("\n  and ");
    return last != std::string_view::npos && text.ends_with(" has the full list") ? text.substr(0, last) : text;
}

}  // namespace tsr
