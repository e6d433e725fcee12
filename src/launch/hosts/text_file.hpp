// Small files of lines that a user names: read once, with a limit.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tsr {

// The file's bytes. `what` begins the message of an error: NOT_FOUND, IO, PERMISSION; INVALID_ARGUMENT if it is not a
// regular file or a pipe, or has more than `limit` bytes.
[[nodiscard]] std::string read_text_file(const std::string& path, size_t limit, std::string_view what);

// The lines, without spaces at either end.
[[nodiscard]] std::vector<std::string_view> trimmed_lines(std::string_view text);
[[nodiscard]] std::string_view trimmed(std::string_view text);

// The pieces between the separators; one empty piece for an empty text.
[[nodiscard]] std::vector<std::string_view> pieces_of(std::string_view text, char separator);

// A part of a text as it can be shown in a message: one line, cut.
[[nodiscard]] std::string shown(std::string_view text);

}  // namespace tsr
