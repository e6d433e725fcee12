#include "checkpoint/formats/native/rank_file_writer.hpp"

#include <algorithm>
#include <utility>

#include "base/crc32c.hpp"

namespace tsr {

SavedFile write_rank_file(FileSystem& files, const std::string& directory, const std::string& name, FileHeader header,
                          const ChunkSource& stream, std::vector<uint32_t> crcs, const WriteOptions& options) {
    const std::string path = join(directory, name);
    const auto data_begin = static_cast<int64_t>(header.text.size());
    const int64_t size = header.file_bytes();
    const auto file = create_reserved(files, path, size);
    const auto write_header = [&] {
        header.set_crcs(crcs);
        AlignedBuffer aligned(std::min(header.text.size(), static_cast<size_t>(chunk_bytes)));
        for (size_t at = 0; at < header.text.size(); at += aligned.size()) {
            const size_t bytes = header.text.copy(reinterpret_cast<char*>(aligned.data()), aligned.size(), at);
            write_all(*file, path, aligned.first(bytes), static_cast<int64_t>(at));
        }
    };
    if (files.writes_in_order()) {
        // The header is written first then, so its checksums need all data beforehand.
        if (crcs.empty()) crcs = block_crcs(stream, options.threads);
        write_header();
        write_stream(*file, path, data_begin, stream, one_writer(options), nullptr);
    } else {
        crcs.assign(header.block_count(), 0);
        write_stream(*file, path, data_begin, stream, options,
                     [&](int64_t at, std::span<const std::byte> chunk) { set_block_crcs(crcs, at, chunk); });
        write_header();
    }
    finish_file(*file, path, size);
    return {name, size, crc32c(header.text)};
}

}  // namespace tsr
