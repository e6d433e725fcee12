#include "base/base64.hpp"

#include <openssl/evp.h>

#include <algorithm>

#include "base/error.hpp"

namespace tsr {

namespace {

constexpr size_t chunk = size_t{3} << 28;  // OpenSSL counts bytes in an int

}  // namespace

std::string to_base64(std::string_view bytes) {
    std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');  // and a final 0
    size_t size = 0;
    for (size_t at = 0; at < bytes.size(); at += chunk) {
        const std::string_view part = bytes.substr(at, chunk);
        size += static_cast<size_t>(EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data() + size),
                                                    reinterpret_cast<const unsigned char*>(part.data()),
                                                    static_cast<int>(part.size())));
    }
    text.resize(size);
    return text;
}

std::string from_base64(std::string_view text) {
    std::string bytes(text.size() / 4 * 3, '\0');
    size_t size = 0;
    for (size_t at = 0; at < text.size(); at += chunk) {
        const std::string_view part = text.substr(at, chunk);
        const int decoded =
            EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data() + size),
                            reinterpret_cast<const unsigned char*>(part.data()), static_cast<int>(part.size()));
        if (decoded < 0 || text.size() % 4 != 0) throw Error(Code::corrupt, "a value's bytes are not base64");
        size += static_cast<size_t>(decoded);
    }
    const size_t padding = text.size() - (text.find_last_not_of('=') + 1);
    if (padding > 2) throw Error(Code::corrupt, "a value's bytes are not base64");
    bytes.resize(size - (text.empty() ? 0 : padding));
    return bytes;
}

}  // namespace tsr
