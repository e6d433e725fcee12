// What the page cache has of a file.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

namespace tsr::testing {

// Drops what the page cache has of the file. False where it cannot be dropped: the file is memory alone.
inline bool drop_from_cache(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const auto size = static_cast<size_t>(std::filesystem::file_size(path));
    std::vector<unsigned char> resident((size + 4095) / 4096);
    bool dropped = ::fsync(fd) == 0 && ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0;
    void* mapped = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    dropped = dropped && mapped != MAP_FAILED && ::mincore(mapped, size, resident.data()) == 0 &&
              std::count_if(resident.begin(), resident.end(), [](auto page) { return (page & 1) != 0; }) == 0;
    if (mapped != MAP_FAILED) ::munmap(mapped, size);
    ::close(fd);
    return dropped;
}

}  // namespace tsr::testing
