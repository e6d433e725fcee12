// A new file whose data is copied from another checkpoint, batch by batch, in bounded memory. Room is left for the
// header, which is written last. Checksums of the blocks are computed on the way.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/load/checkpoint.hpp"
#include "checkpoint/model/batches.hpp"

namespace tsr {

struct StreamedPart {
    std::string name;  // in the source checkpoint
    TypedBox box;
};

class StreamedFile {
   public:
    // Creates `path`, which must not exist, and reserves its size.
    StreamedFile(FileSystem& files, std::string path, int64_t header_bytes, int64_t data_bytes);

    void append(const Checkpoint& source, std::span<const StreamedPart> parts, const ByteProgress& progress);
    // The CRC32C of each block of data; complete when everything is appended.
    [[nodiscard]] std::span<const uint32_t> crcs() const { return crcs_; }
    // `header` must have `header_bytes` bytes. The file is fsynced, its directory is not.
    void finish(std::string_view header);

   private:
    void add_to_crcs(std::span<const std::byte> data);

    std::string path_;
    std::unique_ptr<File> file_;
    int64_t header_bytes_;
    int64_t data_bytes_;
    int64_t done_ = 0;  // bytes of data
    std::vector<uint32_t> crcs_;
};

}  // namespace tsr
