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
#include "checkpoint/native/rank_file.hpp"

namespace tsr {

// The data of a file as one byte range over the pieces' memories.
class ByteRuns {
   public:
    explicit ByteRuns(std::span<const Piece> pieces);  // in file order; neighbours in memory become one run
    ByteRuns(const std::byte* image, int64_t size);    // all data in one place
    explicit ByteRuns(std::span<const std::span<const std::byte>> parts);

    [[nodiscard]] int64_t size() const { return size_; }
    // Where [begin, end) lies in memory if it is one run, else nullptr.
    [[nodiscard]] const std::byte* contiguous(int64_t begin, int64_t end) const;
    void copy(int64_t begin, int64_t end, std::byte* to) const;

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
};

// A new file of `size` bytes to come, its room reserved: a full disk is noticed before anything is written.
[[nodiscard]] std::unique_ptr<File> create_reserved(FileSystem& files, const std::string& path, int64_t size);
// Writes the stream at `begin`, a multiple of 4096, by a few threads. `seen`, if given, is called for each chunk of 4 MiB
// with its place in the stream. The file may end up to 4095 bytes longer.
void write_stream(File& file, const std::string& path, int64_t begin, const ByteRuns& stream,
                  const WriteOptions& options,
                  const std::function<void(int64_t at, std::span<const std::byte> chunk)>& seen);
// Cuts the file to its size and fsyncs it.
void finish_file(File& file, const std::string& path, int64_t size);

// Writes `header` (whose checksums it fills in) and data into a new file. Returns what the manifest says of it; the file
// is fsynced, its directory is not.
[[nodiscard]] SavedFile write_rank_file(FileSystem& files, const std::string& directory, const std::string& name,
                                        FileHeader header, const ByteRuns& stream, const WriteOptions& options = {});

}  // namespace tsr
