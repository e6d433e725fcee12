// Text from files, for a terminal: no escape sequence in it may reach the reader's terminal.
#pragma once

#include <string>
#include <string_view>

namespace tsr::cli {

[[nodiscard]] std::string printable(std::string_view text);        // one line; what a terminal may obey, as '?'
[[nodiscard]] std::string printable_lines(std::string_view text);  // each of them so, and with a newline

}  // namespace tsr::cli
