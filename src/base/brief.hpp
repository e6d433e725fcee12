#pragma once

#include <string>
#include <string_view>

namespace tsr {

// Shortens UTF-8 text to at most `bytes` (at least 3), ending with an ellipsis and never inside a character.
inline std::string brief(std::string_view text, size_t bytes) {
    constexpr std::string_view ellipsis = "...";
    if (text.size() <= bytes) return std::string(text);
    size_t end = bytes - ellipsis.size();
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
    return std::string(text.substr(0, end)).append(ellipsis);
}

}  // namespace tsr
