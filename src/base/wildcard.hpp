// Patterns of names as a shell has them, the same in every locale: '*' is any characters, dots and slashes too, '?' is one,
// "[abc]", "[a-z]" and "[!abc]" are one of a set, '\' before a character is that character. A '[' that is never closed is
// itself.
#pragma once

#include <string_view>

namespace tsr {

// Both are UTF-8; of what is not, a character is whatever its first byte says. Takes time of pattern times name.
[[nodiscard]] bool fits(std::string_view pattern, std::string_view name);
// Whether it may fit names other than itself.
[[nodiscard]] bool is_pattern(std::string_view text);

}  // namespace tsr
