// Makes text from files safe for a terminal: no escape sequence in it may reach the reader's terminal.
#pragma once

#include <string>
#include <string_view>

namespace tsr::cli {

[[nodiscard]] std::string printable(std::string_view text);        // one line; control characters become '?'
[[nodiscard]] std::string printable_lines(std::string_view text);  // likewise for each line, with a newline

}  // namespace tsr::cli
