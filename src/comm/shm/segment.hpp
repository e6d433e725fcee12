// Memory shared by the ranks of a host: a memfd, sealed against shrinking so that a peer cannot cut it under our feet,
// mapped. It has no name: when the last process that maps it is gone, so is it. Ranks that are threads of one process
// share one Segment, so that ThreadSanitizer sees what they do to each other.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "base/fd.hpp"

namespace tsr::shm {

class Segment {
   public:
    // Zeroed memory and the descriptor to hand to the peers. Throws NO_MEMORY, IO.
    [[nodiscard]] static std::pair<std::shared_ptr<Segment>, Fd> create(size_t size);
    // Maps a peer's; throws CORRUPT if it is not sealed or smaller than `size`.
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

// A wish; most systems grant it to shared memory only if told so (transparent_hugepage/shmem_enabled).
void prefer_huge_pages(const Segment& segment);

// Takes the pages of a range of a segment from the system now rather than at first touch. Throws NO_MEMORY.
void populate(std::byte* data, size_t size);

}  // namespace tsr::shm
