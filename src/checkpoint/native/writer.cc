#include "checkpoint/native/writer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/parallel.hpp"
#include "base/round_up.hpp"

namespace tsr {

namespace {

static_assert(chunk_bytes % block_bytes == 0);

bool is_aligned(const std::byte* memory) {
    return reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(direct_alignment) == 0;
}

}  // namespace

ByteRuns::ByteRuns(std::span<const Piece> pieces) {
    for (const Piece& piece : pieces) add(piece.data, piece.size_bytes());
}

ByteRuns::ByteRuns(std::span<const std::span<const std::byte>> parts) {
    for (const auto part : parts) add(part.data(), static_cast<int64_t>(part.size()));
}

void ByteRuns::add(const std::byte* data, int64_t size) {
    if (size == 0) return;
    if (data_.empty() || data_.back() + (size_ - begins_.back()) != data) {
        begins_.push_back(size_);
        data_.push_back(data);
    }
    size_ += size;
}

const std::byte* ByteRuns::contiguous(int64_t begin, int64_t end) const {
    const size_t run = run_of(begin);
    return end <= run_end(run) ? data_[run] + (begin - begins_[run]) : nullptr;
}

void ByteRuns::copy(int64_t begin, int64_t end, std::byte* to) const {
    for_each_run(begin, end, [&](std::span<const std::byte> run) {
        std::memcpy(to, run.data(), run.size());
        to += run.size();
    });
}

void ByteRuns::for_each_run(int64_t begin, int64_t end,
                            const std::function<void(std::span<const std::byte>)>& visit) const {
    for (size_t run = run_of(begin); begin < end; ++run) {
        const int64_t stop = std::min(end, run_end(run));
        visit({data_[run] + (begin - begins_[run]), static_cast<size_t>(stop - begin)});
        begin = stop;
    }
}

size_t ByteRuns::run_of(int64_t offset) const {
    return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin()) - 1;
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
    std::vector<AlignedBuffer> buffers(static_cast<size_t>(std::max(options.threads, 1)));
    const auto write_chunk = [&](size_t chunk, int worker) {
        const int64_t begin = static_cast<int64_t>(chunk) * chunk_bytes;
        const int64_t end = std::min(begin + chunk_bytes, stream.size());
        const int64_t written = file.is_direct() ? round_up(end - begin, direct_alignment) : end - begin;
        const std::byte* data = stream.contiguous(begin, end);
        const bool as_it_stands =
            data != nullptr && (!file.is_direct() || (is_aligned(data) && written == end - begin));
        if (!as_it_stands) {
            AlignedBuffer& buffer = buffers[static_cast<size_t>(worker)];
            if (buffer.size() == 0) {
                const int64_t largest = std::min(chunk_bytes, round_up(stream.size(), direct_alignment));
                buffer = AlignedBuffer(static_cast<size_t>(largest));
            }
            stream.copy(begin, end, buffer.data());
            std::memset(buffer.data() + (end - begin), 0, static_cast<size_t>(written - (end - begin)));
            data = buffer.data();
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

namespace {

// Of the blocks of `chunk`, which begins at byte `at` of the stream.
void add_crcs(std::vector<uint32_t>& crcs, int64_t at, std::span<const std::byte> chunk) {
    for (size_t block = 0; block < chunk.size(); block += static_cast<size_t>(block_bytes)) {
        const size_t bytes = std::min(static_cast<size_t>(block_bytes), chunk.size() - block);
        crcs[(static_cast<size_t>(at) + block) / static_cast<size_t>(block_bytes)] =
            crc32c(chunk.subspan(block, bytes));
    }
}

size_t block_count(int64_t size) { return static_cast<size_t>(round_up(size, block_bytes) / block_bytes); }

}  // namespace

std::vector<uint32_t> block_crcs(const ChunkSource& stream, int threads) {
    std::vector<uint32_t> crcs(block_count(stream.size()));
    const auto chunks = static_cast<size_t>(round_up(stream.size(), chunk_bytes) / chunk_bytes);
    std::vector<AlignedBuffer> buffers(static_cast<size_t>(std::max(threads, 1)));
    run_parallel(chunks, threads, [&](size_t chunk, int worker) {
        const int64_t begin = static_cast<int64_t>(chunk) * chunk_bytes;
        const int64_t end = std::min(begin + chunk_bytes, stream.size());
        const std::byte* data = stream.contiguous(begin, end);
        if (data == nullptr) {
            AlignedBuffer& buffer = buffers[static_cast<size_t>(worker)];
            if (buffer.size() == 0) buffer = AlignedBuffer(static_cast<size_t>(chunk_bytes));
            stream.copy(begin, end, buffer.data());
            data = buffer.data();
        }
        add_crcs(crcs, begin, std::span(data, static_cast<size_t>(end - begin)));
    });
    return crcs;
}

void finish_file(File& file, const std::string& path, int64_t size) {
    if (const int64_t cut = file.truncate(size); cut < 0) {
        throw os_error(fmt::format("cannot set the size of {}", path), static_cast<int>(-cut));
    }
    sync_file(file, path);
}

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
        // The header goes first then, and its checksums take a look at all data before.
        if (crcs.empty()) crcs = block_crcs(stream, options.threads);
        write_header();
        write_stream(*file, path, data_begin, stream, one_writer(options), nullptr);
    } else {
        crcs.assign(header.block_count(), 0);
        write_stream(*file, path, data_begin, stream, options,
                     [&](int64_t at, std::span<const std::byte> chunk) { add_crcs(crcs, at, chunk); });
        write_header();
    }
    finish_file(*file, path, size);
    return {name, size, crc32c(header.text)};
}

}  // namespace tsr
