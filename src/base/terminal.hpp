// What a descriptor's terminal, if it is one, can show.
#pragma once

#include <cstddef>

namespace tsr {

[[nodiscard]] size_t terminal_width(int fd);  // in columns; 0: not a terminal, or unknown
[[nodiscard]] bool wants_colours(int fd);     // a terminal, and NO_COLOR is not set

}  // namespace tsr
