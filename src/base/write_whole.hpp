// Writing to a descriptor that may take less than it is given.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace tsr {

// All of it, in as many calls as that takes; false, with errno, if it fails.
[[nodiscard]] inline bool write_whole(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(fd, bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return false;
        bytes.remove_prefix(static_cast<size_t>(written));
    }
    return true;
}

}  // namespace tsr
