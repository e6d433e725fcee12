// What a rank reads of files whose data stands in no blocks of its own, as ranges of bytes: those that other ranks of the
// host want too are cut at blocks and exchanged with them (host_reads.hpp), the others are read as they are.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "checkpoint/formats/host_reads.hpp"

namespace tsr {

// Bytes from `begin` to `end` of what begins at `place` of a file. Longer than most_bytes below it is cut at multiples of that.
struct ByteRange {
    int64_t file = 0;
    int64_t place = 0;
    int64_t begin = 0;
    int64_t end = 0;
    bool may_be_shared = true;  // and cut at multiples of block_bytes
};

class SharedRanges {
   public:
    // Of the `range`-th range. Those of one chunk are exchanged together; -1: this rank's own, of at most most_bytes.
    struct Part {
        size_t range = 0;
        int64_t begin = 0;
        int64_t end = 0;
        int64_t chunk = -1;
    };
    static constexpr int64_t most_bytes = int64_t{4} << 20;
    struct Work {
        std::function<void(size_t part, int worker)> read;  // of this rank alone; any thread
        // Reads what there is of blocks into `slot`, and returns what the ranks that take it shall know; any thread.
        std::function<uint32_t(const ByteRange& blocks, std::byte* slot)> fill;
        std::function<void(size_t part, const std::byte* data, uint32_t told)> take;  // the calling thread
        std::function<void()> poll;                                                   // the calling thread
        int threads = 4;
    };

    // Collective over the ranks of `host`, if it is given.
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
