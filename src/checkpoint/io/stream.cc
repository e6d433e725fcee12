#include "checkpoint/io/stream.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "base/parallel.hpp"
#include "base/round_up.hpp"

namespace tsr {

namespace {

bool is_aligned(const std::byte* memory) {
    return reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(direct_alignment) == 0;
}

}  // namespace

std::shared_ptr<std::byte> ChunkSource::buffer() const {
    const auto memory = std::make_shared<AlignedBuffer>(static_cast<size_t>(chunk_bytes));
    return {memory, memory->data()};
}

std::unique_ptr<File> create_reserved(FileSystem& files, const std::string& path, int64_t size) {
    auto file = open_file(files, path, OpenMode::create_direct);
    // Reserving also keeps direct writes from extending the file each time.
    reserve_file(*file, path, round_up(size, direct_alignment));
    return file;
}

void write_stream(File& file, const std::string& path, int64_t data_begin, const ChunkSource& stream,
                  const WriteOptions& options,
                  const std::function<void(int64_t at, std::span<const std::byte> chunk)>& seen) {
    const auto chunks = static_cast<size_t>(round_up(stream.size(), chunk_bytes) / chunk_bytes);
    std::vector<std::shared_ptr<std::byte>> buffers(static_cast<size_t>(std::max(options.threads, 1)));
    const auto write_chunk = [&](size_t chunk, int worker) {
        const int64_t begin = static_cast<int64_t>(chunk) * chunk_bytes;
        const int64_t end = std::min(begin + chunk_bytes, stream.size());
        const int64_t written = file.is_direct() ? round_up(end - begin, direct_alignment) : end - begin;
        const std::byte* data = stream.contiguous(begin, end);
        const bool as_it_stands =
            data != nullptr && (!file.is_direct() || (is_aligned(data) && written == end - begin));
        if (!as_it_stands) {
            std::shared_ptr<std::byte>& buffer = buffers[static_cast<size_t>(worker)];
            if (buffer == nullptr) buffer = stream.buffer();
            stream.copy(begin, end, buffer.get());
            std::memset(buffer.get() + (end - begin), 0, static_cast<size_t>(written - (end - begin)));
            data = buffer.get();
        }
        if (seen) seen(begin, std::span(data, static_cast<size_t>(end - begin)));
        if (options.pace != nullptr) options.pace->spend(written);
        write_all(file, path, std::span(data, static_cast<size_t>(written)), data_begin + begin);
        stream.written(begin);
        if (!file.is_direct()) file.start_writeback(data_begin + begin, end - begin);
        if (options.progress != nullptr) options.progress->add(end - begin);
    };
    run_parallel(chunks, options.threads, write_chunk, [&] {
        if (options.progress != nullptr) options.progress->poll();
    });
}

WriteOptions one_writer(WriteOptions options) {
    options.threads = 1;
    return options;
}

void finish_file(File& file, const std::string& path, int64_t size) {
    if (const int64_t cut = file.truncate(size); cut < 0) {
        throw os_error(fmt::format("cannot set the size of {}", path), static_cast<int>(-cut));
    }
    sync_file(file, path);
}

}  // namespace tsr
