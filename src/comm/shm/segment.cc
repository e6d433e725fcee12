#include "comm/shm/segment.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"
#include "base/file_limit.hpp"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tsr::shm {

namespace {

Fd open_memfd() {
    // Kernels before 6.3 do not know NOEXEC_SEAL.
    int fd = ::memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) fd = ::memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw os_error("cannot create shared memory (memfd_create)", errno);
    return Fd(fd);
}

}  // namespace

std::pair<std::shared_ptr<Segment>, Fd> Segment::create(size_t size) {
    Fd memfd = open_memfd();
    if (!within_file_limit(size)) throw os_error(fmt::format("cannot create {} bytes of shared memory", size), EFBIG);
    if (::ftruncate(memfd.get(), static_cast<off_t>(size)) != 0) {
        const int code = errno == EFBIG || errno == EINVAL ? ENOMEM : errno;
        throw os_error(fmt::format("cannot create {} bytes of shared memory", size), code);
    }
    if (::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw os_error("cannot seal shared memory", errno);
    }
    auto segment = map(memfd, size);
    return {std::move(segment), std::move(memfd)};
}

std::shared_ptr<Segment> Segment::attach(const Fd& memfd, size_t size) {
    const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        throw Error(Code::corrupt, "shared memory from a peer is not sealed against shrinking");
    }
    struct stat status{};
    if (::fstat(memfd.get(), &status) != 0) throw os_error("cannot stat shared memory", errno);
    if (status.st_size < 0 || static_cast<size_t>(status.st_size) < size) {
        throw Error(Code::corrupt,
                    fmt::format("received {} bytes of shared memory from a peer; expected {}", status.st_size, size));
    }
    return map(memfd, size);
}

std::shared_ptr<Segment> Segment::map(const Fd& memfd, size_t size) {
    void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
    if (data == MAP_FAILED) throw os_error(fmt::format("cannot map {} bytes of shared memory", size), errno);
    return std::shared_ptr<Segment>(new Segment(static_cast<std::byte*>(data), size));
}

Segment::~Segment() { ::munmap(data_, size_); }

void prefer_huge_pages(const Segment& segment) { ::madvise(segment.data(), segment.size(), MADV_HUGEPAGE); }

void populate(std::byte* data, size_t size) {
    if (size == 0 || ::madvise(data, size, MADV_POPULATE_WRITE) == 0) return;
    if (errno == EINVAL) return;  // kernels before 5.14: the pages come at first touch
    throw os_error(fmt::format("cannot populate {} bytes of shared memory", size), errno == EFAULT ? ENOMEM : errno);
}

}  // namespace tsr::shm
