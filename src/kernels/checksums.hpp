// CRC32C of many ranges of bytes, chunk by chunk: the checksum of a range is its chunks' joined (base/crc32c.hpp).
#pragma once

#include "base/crc32c_field.hpp"
#include "kernels/tensor_table.hpp"
#include "kernels/thread.hpp"

namespace tsr::kernels {

// Each thread reads a slice, counted from the end of the chunk, so that only the first slice of a chunk may be short. Then
// neighbours are joined, in eight levels. Launches one after the other write one list.
struct ChecksumOfChunks {
    static constexpr unsigned threads = 256;
    static constexpr unsigned slice = chunk_elements / threads;
    static constexpr int phases = 2 + 8;
    static_assert(1U << (phases - 2) == threads);
    struct Shared {
        uint32_t of_bytes[256];
        uint32_t of_slices[threads];
    };

    TensorTable<1> tensors;  // of bytes
    const void* checksums;   // uint32_t, one for each block

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    void advance() { checksums = static_cast<const uint32_t*>(checksums) + blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {1});
        visit(checksums, blocks() * sizeof(uint32_t));
    }
    template <int phase>
    TSR_HD void run(const Thread& thread, Shared& shared) const {
        const unsigned i = thread.index;
        if constexpr (phase == 0) {
            shared.of_bytes[i] = crc32c_of_byte(i);
        } else if constexpr (phase == 1) {
            const auto chunk = tensors.chunk(thread.block);
            const auto* const bytes = tensors.at<const uint8_t>(0, chunk);
            shared.of_slices[i] =
                chunk.elements > i * slice ? of_slice(bytes, chunk.elements - i * slice, shared.of_bytes) : 0;
        } else {
            constexpr unsigned joined = 1U << (phase - 2);  // slices of each part that is joined
            constexpr uint32_t shift = crc32c_shift(size_t{slice} * joined);
            if (i % (2 * joined) != 0) return;
            shared.of_slices[i] ^= crc32c_times(shared.of_slices[i + joined], shift);
            if (2 * joined == threads) {
                static_cast<uint32_t*>(const_cast<void*>(checksums))[thread.block] = ~shared.of_slices[0];
            }
        }
    }

   private:
    // Of the slice that ends at byte `end` of a chunk. The chunk's first begins with all bits set.
    TSR_HD static uint32_t of_slice(const uint8_t* bytes, unsigned end, const uint32_t* of_bytes) {
        const unsigned begin = end > slice ? end - slice : 0;
        uint32_t crc = begin == 0 ? ~0U : 0U;
        const auto add = [&](uint8_t byte) { crc = of_bytes[(crc ^ byte) & 255U] ^ crc >> 8; };
        if (end - begin == slice && is_aligned(bytes + begin, slice)) {
            const auto pack = load<slice>(bytes + begin);
            for (const uint8_t byte : pack.values) add(byte);
        } else {
            for (unsigned i = begin; i < end; ++i) add(bytes[i]);
        }
        return crc;
    }
};
static_assert(ChecksumOfChunks::slice == pack_bytes);

}  // namespace tsr::kernels
