// Complete writes: to a descriptor that may accept only part of the bytes, and of small files that readers see
// completely or not at all.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <string_view>

namespace tsr {

// Writes all bytes, in as many calls as necessary. Returns false with errno set on failure.
[[nodiscard]] inline bool write_whole(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(fd, bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return false;
        bytes.remove_prefix(static_cast<size_t>(written));
    }
    return true;
}

// Writes a new draft next to `path` and renames it over `path`; a link at the draft's name is removed, not followed.
// Does not fsync: data that must survive a power loss goes through checkpoint/io. Throws IO.
void write_whole_file(const std::string& path, std::string_view text, mode_t mode);

}  // namespace tsr
