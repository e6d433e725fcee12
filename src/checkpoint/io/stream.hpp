// Streams data into a file: a few threads write chunks of 4 MiB, directly from the tensor's memory if memory and file
// offset are aligned, otherwise (also from devices) through a buffer per thread. Memory: one chunk per thread, whatever the file's size.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/file_system.hpp"
#include "checkpoint/io/pace.hpp"
#include "checkpoint/io/progress.hpp"

namespace tsr {

inline constexpr int64_t chunk_bytes = int64_t{4} << 20;  // one request

// The data of a file, taken by the writer chunk by chunk, in order of their offsets, from several threads.
class ChunkSource {
   public:
    virtual ~ChunkSource() = default;
    [[nodiscard]] virtual int64_t size() const = 0;
    // The memory of [begin, end), a part of one chunk, if it is contiguous; otherwise nullptr. May wait for the data.
    [[nodiscard]] virtual const std::byte* contiguous(int64_t begin, int64_t end) const = 0;
    virtual void copy(int64_t begin, int64_t end, std::byte* to) const = 0;
    // Memory for a chunk, aligned to 4096 bytes, to which copy() is fast.
    [[nodiscard]] virtual std::shared_ptr<std::byte> buffer() const;
    // Called when the chunk at `begin` is on its way to disk and its memory is no longer needed.
    virtual void written(int64_t /*begin*/) const {}
};

struct WriteOptions {
    int threads = 4;  // = requests in flight
    Pace* pace = nullptr;
    Progress* progress = nullptr;  // counts the bytes of data; polled on the calling thread
};

// Creates a file and reserves `size` bytes, so that a full disk is noticed before anything is written.
[[nodiscard]] std::unique_ptr<File> create_reserved(FileSystem& files, const std::string& path, int64_t size);
// Writes the stream at `begin`, a multiple of 4096, on a few threads. `seen`, if given, is called for each chunk of 4
// MiB with its offset in the stream. The file may get up to 4095 bytes too long.
void write_stream(File& file, const std::string& path, int64_t begin, const ChunkSource& stream,
                  const WriteOptions& options,
                  const std::function<void(int64_t at, std::span<const std::byte> chunk)>& seen);
// The options for a file system that writes in order: one thread.
[[nodiscard]] WriteOptions one_writer(WriteOptions options);
// Cuts the file to its size and fsyncs it.
void finish_file(File& file, const std::string& path, int64_t size);

}  // namespace tsr
