// Memory shared by the ranks of a host: a mapped memfd, sealed so that a peer cannot shrink it while it is in use. It
// has no name and disappears with the last process that maps it. Ranks that are threads of one process share one
// Segment, so that ThreadSanitizer sees their accesses.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "base/fd.hpp"

namespace tsr::shm {

class Segment {
   public:
    // Returns zeroed memory and the descriptor to pass to the peers. Throws NO_MEMORY, IO.
    [[nodiscard]] static std::pair<std::shared_ptr<Segment>, Fd> create(size_t size);
    // Maps a peer's segment. Throws CORRUPT if it is not sealed or smaller than `size`.
    [[nodiscard]] static std::shared_ptr<Segment> attach(const Fd& memfd, size_t size);

    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();

    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] size_t size() const { return size_; }

   private:
    Segment(std::byte* data, size_t size) : data_(data), size_(size) {}
    [[nodiscard]] static std::shared_ptr<Segment> map(const Fd& memfd, size_t size);

    std::byte* data_;
    size_t size_;
};

// A hint; most systems honour it for shared memory only if configured to (transparent_hugepage/shmem_enabled).
void prefer_huge_pages(const Segment& segment);

// Allocates the pages of a range of a segment now rather than on first access. Throws NO_MEMORY.
void populate(std::byte* data, size_t size);

}  // namespace tsr::shm
