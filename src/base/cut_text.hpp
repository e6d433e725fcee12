#pragma once

#include <string>
#include <string_view>

namespace tsr {

// At most `bytes` of UTF-8, cut at a whole character.
inline std::string cut_text(std::string_view text, size_t bytes) {
    while (bytes > 0 && bytes < text.size() && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
    return std::string(text.substr(0, bytes));
}

// What a file of anybody says, for a message: it may be as long as the file.
inline std::string brief(std::string_view text, size_t bytes) {
    return text.size() <= bytes ? std::string(text) : cut_text(text, bytes) + "...";
}

}  // namespace tsr
