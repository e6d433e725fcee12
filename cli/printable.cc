#include "printable.hpp"

#include <algorithm>

namespace tsr::cli {

std::string printable(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    for (size_t i = 0; i < text.size();) {
        const bool is_control = byte(i) < 0x20 || byte(i) == 0x7f;
        const bool is_c1 = byte(i) == 0xc2 && byte(i + 1) >= 0x80 && byte(i + 1) < 0xa0;
        // U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069: they turn the direction or end the line.
        const unsigned last = byte(i + 2);
        const bool turns = byte(i) == 0xe2 &&
                           ((byte(i + 1) == 0x80 && (last == 0x8e || last == 0x8f || (last >= 0xa8 && last <= 0xae))) ||
                            (byte(i + 1) == 0x81 && last >= 0xa6 && last <= 0xa9));
        if (is_control || is_c1 || turns) {
            out += '?';
            i += is_control ? 1 : is_c1 ? 2 : 3;
        } else {
            out += text[i++];
        }
    }
    return out;
}

std::string printable_lines(std::string_view text) {
    std::string out;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        out += printable(text.substr(begin, end - begin)) + "\n";
        begin = end + 1;
    }
    return out;
}

}  // namespace tsr::cli
