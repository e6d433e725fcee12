// Writing all of it: to a descriptor that may take less than it is given, and small files that a reader sees whole or not
// at all.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <string>
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

// Writes a new draft beside `path` and renames it over `path`; a link in the draft's place is removed, not followed. Not
// fsynced: what has to outlive a power loss goes through checkpoint/io.
void write_whole_file(const std::string& path, std::string_view text, mode_t mode);

}  // namespace tsr
