#include "checkpoint/io/blocks.hpp"

#include <algorithm>

#include "base/crc32c.hpp"
#include "base/parallel.hpp"
#include "base/round_up.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

static_assert(chunk_bytes % block_bytes == 0);

void set_block_crcs(std::vector<uint32_t>& crcs, int64_t at, std::span<const std::byte> chunk) {
    for (size_t block = 0; block < chunk.size(); block += static_cast<size_t>(block_bytes)) {
        const size_t bytes = std::min(static_cast<size_t>(block_bytes), chunk.size() - block);
        crcs[(static_cast<size_t>(at) + block) / static_cast<size_t>(block_bytes)] =
            crc32c(chunk.subspan(block, bytes));
    }
}

std::vector<uint32_t> block_crcs(const ChunkSource& stream, int threads) {
    std::vector<uint32_t> crcs(static_cast<size_t>(round_up(stream.size(), block_bytes) / block_bytes));
    const auto chunks = static_cast<size_t>(round_up(stream.size(), chunk_bytes) / chunk_bytes);
    std::vector<std::shared_ptr<std::byte>> buffers(static_cast<size_t>(std::max(threads, 1)));
    run_parallel(chunks, threads, [&](size_t chunk, int worker) {
        const int64_t begin = static_cast<int64_t>(chunk) * chunk_bytes;
        const int64_t end = std::min(begin + chunk_bytes, stream.size());
        const std::byte* data = stream.contiguous(begin, end);
        if (data == nullptr) {
            std::shared_ptr<std::byte>& buffer = buffers[static_cast<size_t>(worker)];
            if (buffer == nullptr) buffer = stream.buffer();
            stream.copy(begin, end, buffer.get());
            data = buffer.get();
        }
        set_block_crcs(crcs, begin, std::span(data, static_cast<size_t>(end - begin)));
    });
    return crcs;
}

}  // namespace tsr
