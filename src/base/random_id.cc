#include "base/random_id.hpp"

#include <fmt/core.h>
#include <sys/random.h>

#include <array>
#include <cerrno>

#include "base/error.hpp"

namespace tsr {

void random_bytes(uint8_t* bytes, size_t size) {
    while (size > 0) {
        const ssize_t got = ::getrandom(bytes, size, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) throw os_error("getrandom", errno);
        bytes += got;
        size -= static_cast<size_t>(got);
    }
}

std::string random_id() {
    std::array<uint8_t, 16> bytes{};
    random_bytes(bytes.data(), bytes.size());
    std::string text;
    for (const uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
    return text;
}

}  // namespace tsr
