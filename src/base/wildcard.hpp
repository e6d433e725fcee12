// Shell patterns for names, independent of the locale: '*' matches any characters, including dots and slashes, '?'
// matches one, "[abc]", "[a-z]" and "[!abc]" match one of a set, and '\' escapes a character. An unclosed '[' matches
// itself.
#pragma once

#include <string_view>

namespace tsr {

// Both are UTF-8; in invalid UTF-8 the first byte determines the length of a character. Takes time proportional to the
// product of the lengths.
[[nodiscard]] bool fits(std::string_view pattern, std::string_view name);
// Whether `text` can match names other than itself.
[[nodiscard]] bool is_pattern(std::string_view text);

}  // namespace tsr
