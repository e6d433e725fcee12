// Reads byte ranges of files whose format has no blocks: ranges that other ranks of the host also want are cut at
// blocks and exchanged with them (host_reads.hpp); the others are read directly.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "checkpoint/formats/host_reads.hpp"

namespace tsr {

// Bytes `begin` to `end`, relative to `place` in a file. A range longer than most_bytes (below) is cut at its
// multiples.
struct ByteRange {
    int64_t file = 0;
    int64_t place = 0;
    int64_t begin = 0;
    int64_t end = 0;
    bool may_be_shared = true;  // and then cut at multiples of block_bytes
};

class SharedRanges {
   public:
    // A part of range number `range`. Parts of one chunk are exchanged together; -1: read by this rank alone, of at
    // most most_bytes.
    struct Part {
        size_t range = 0;
        int64_t begin = 0;
        int64_t end = 0;
        int64_t chunk = -1;
    };
    static constexpr int64_t most_bytes = int64_t{4} << 20;
    struct Work {
        std::function<void(size_t part, int worker)> read;  // reads a part of this rank alone; any thread
        // Reads the existing bytes of blocks into `slot`; the result is passed to take() on the ranks. Any thread.
        std::function<uint32_t(const ByteRange& blocks, std::byte* slot)> fill;
        std::function<void(size_t part, const std::byte* data, uint32_t told)> take;  // the calling thread
        std::function<void()> poll;                                                   // the calling thread
        int threads = 4;
    };

    // Collective over the ranks of `host`, if given.
    SharedRanges(HostReads* host, std::vector<ByteRange> ranges);

    [[nodiscard]] const std::vector<Part>& parts() const { return parts_; }  // in the order of the ranges
    [[nodiscard]] int64_t size_bytes() const;
    void run(const Work& work) const;

   private:
    [[nodiscard]] std::vector<HostReads::Range> blocks() const;
    void cut(size_t range, std::span<const size_t> wanted);

    HostReads* host_;
    std::vector<ByteRange> ranges_;
    std::span<const HostReads::Chunk> chunks_;
    std::vector<Part> parts_;
};

}  // namespace tsr
