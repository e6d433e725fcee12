// Streams one rank file to disk: a few threads take chunks of 4 MiB, write each straight from the tensor's memory where
// memory and file offset are aligned, else through their own buffer, and compute the block checksums on the way. The
// header goes last. Memory: one chunk a thread, whatever the file's size.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/file_system.hpp"
#include "checkpoint/native/manifest.hpp"
#include "checkpoint/native/pace.hpp"
#include "checkpoint/native/rank_file.hpp"
#include "checkpoint/progress.hpp"

namespace tsr {

inline constexpr int64_t chunk_bytes = int64_t{4} << 20;  // one request

// The data of a file as the writer takes it: chunk by chunk, in order of their starts, from several threads.
class ChunkSource {
   public:
    virtual ~ChunkSource() = default;
    [[nodiscard]] virtual int64_t size() const = 0;
    // Where [begin, end), a part of one chunk, lies in memory in one piece, else nullptr. May wait until it is there.
    [[nodiscard]] virtual const std::byte* contiguous(int64_t begin, int64_t end) const = 0;
    virtual void copy(int64_t begin, int64_t end, std::byte* to) const = 0;
    // The chunk that begins there is on its way to disk, and its memory is no longer looked at.
    virtual void written(int64_t /*begin*/) const {}
};

// One byte range over the pieces' memories.
class ByteRuns final : public ChunkSource {
   public:
    explicit ByteRuns(std::span<const Piece> pieces);  // in file order; neighbours in memory become one run
    explicit ByteRuns(std::span<const std::span<const std::byte>> parts);

    [[nodiscard]] int64_t size() const override { return size_; }
    [[nodiscard]] const std::byte* contiguous(int64_t begin, int64_t end) const override;
    void copy(int64_t begin, int64_t end, std::byte* to) const override;
    // The memory of [begin, end), in order.
    void for_each_run(int64_t begin, int64_t end, const std::function<void(std::span<const std::byte>)>& visit) const;

   private:
    void add(const std::byte* data, int64_t size);
    [[nodiscard]] size_t run_of(int64_t offset) const;
    [[nodiscard]] int64_t run_end(size_t run) const { return run + 1 < begins_.size() ? begins_[run + 1] : size_; }

    std::vector<int64_t> begins_;
    std::vector<const std::byte*> data_;
    int64_t size_ = 0;
};

struct WriteOptions {
    int threads = 4;  // = requests in flight
    Pace* pace = nullptr;
    Progress* progress = nullptr;  // told the bytes of data, polled by the calling thread
};

// A new file of `size` bytes to come, its room reserved: a full disk is noticed before anything is written.
[[nodiscard]] std::unique_ptr<File> create_reserved(FileSystem& files, const std::string& path, int64_t size);
// Writes the stream at `begin`, a multiple of 4096, by a few threads. `seen`, if given, is called for each chunk of 4 MiB
// with its place in the stream. The file may end up to 4095 bytes longer.
void write_stream(File& file, const std::string& path, int64_t begin, const ChunkSource& stream,
                  const WriteOptions& options,
                  const std::function<void(int64_t at, std::span<const std::byte> chunk)>& seen);
// For a file system that writes in order.
[[nodiscard]] WriteOptions one_writer(WriteOptions options);
// Cuts the file to its size and fsyncs it.
void finish_file(File& file, const std::string& path, int64_t size);

// The checksum of each block of the stream, on `threads` threads. Waits for what of it is not there yet.
[[nodiscard]] std::vector<uint32_t> block_crcs(const ChunkSource& stream, int threads);
// Writes `header` (whose checksums it fills in) and data into a new file. Returns what the manifest says of it; the file
// is fsynced, its directory is not. A file system that writes in order needs the checksums before the data: without
// `crcs`, which are its blocks', the stream is looked at twice.
[[nodiscard]] SavedFile write_rank_file(FileSystem& files, const std::string& directory, const std::string& name,
                                        FileHeader header, const ChunkSource& stream, std::vector<uint32_t> crcs = {},
                                        const WriteOptions& options = {});

}  // namespace tsr
