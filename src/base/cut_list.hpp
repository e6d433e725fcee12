// A message that is a list, a line each, is whole in the words of one rank; the others cut theirs, so that a terminal holds it
// once. What reads their messages knows by this where they are cut.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace tsr {

// `shown`, and that `rank` tells `left` lines more.
inline std::string cut_list(std::string_view shown, int64_t left, int rank) {
    return fmt::format("{}\n  and {} more lines, which rank {} tells", shown, left, rank);
}

// What is shown of a list that was cut; all of another text.
inline std::string_view shown_of(std::string_view text) {
    const size_t last = text.rfind("\n  and ");
    return last != std::string_view::npos && text.ends_with(" tells") ? text.substr(0, last) : text;
}

}  // namespace tsr
