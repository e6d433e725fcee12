// Streams data into a file: a few threads take chunks of 4 MiB and write each straight from the tensor's memory where memory
// and file offset are aligned, else through their own buffer. Memory: one chunk a thread, whatever the file's size.
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

}  // namespace tsr
