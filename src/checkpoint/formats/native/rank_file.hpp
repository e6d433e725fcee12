// One rank file: a safetensors file whose header is padded so that the data begins at a multiple of 4096, and contains
// the save's id, PyTorch's sharding offsets and the CRC32C of each block of data at fixed width. The header's size
// follows from names and shapes, so data can be streamed first and the header written last.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/blocks.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/model/piece.hpp"
#include "tensor/layout.hpp"

namespace tsr {

struct FileHeader {
    std::string text;       // length word, JSON, padding: everything before the data
    size_t crc_offset = 0;  // offset in `text` of the first block's 8 digits
    int64_t data_bytes = 0;

    [[nodiscard]] int64_t file_bytes() const { return static_cast<int64_t>(text.size()) + data_bytes; }
    [[nodiscard]] size_t block_count() const {
        return static_cast<size_t>((data_bytes + block_bytes - 1) / block_bytes);
    }
    void set_crcs(std::span<const uint32_t> crcs);  // block_count() of them
};

// Pieces of different names, in file order.
[[nodiscard]] FileHeader make_header(std::span<const Piece> pieces, std::string_view save_id);

struct FileEntry {
    std::string name;
    DType dtype = DType::f32;
    SharedBox box;
    int64_t begin = 0;  // bytes from the start of the data
    int64_t end = 0;
};

// A header read back and checked: no gap, no overlap, no entry beyond the file, one checksum per block.
class RankFile {
   public:
    // Throws CORRUPT naming file and reason. `crc` is the header's checksum in the manifest.
    [[nodiscard]] static RankFile read(FileSystem& files, const std::string& path, int64_t size, uint32_t crc,
                                       std::string_view save_id);
    // The same for a header in memory, of a file of `size` bytes.
    [[nodiscard]] static RankFile parse(std::string_view header, const std::string& path, int64_t size,
                                        std::string_view save_id);

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] int64_t data_begin() const { return data_begin_; }
    [[nodiscard]] int64_t data_bytes() const { return size_ - data_begin_; }
    [[nodiscard]] std::span<const uint32_t> crcs() const { return crcs_; }
    [[nodiscard]] std::span<const FileEntry> entries() const { return entries_; }  // in order of offsets
    // `before`, if given, is an entry of this file that probably directly precedes it.
    [[nodiscard]] const FileEntry* find(std::string_view name, const FileEntry* before = nullptr) const;
    // The entry that contains a byte of the data, or nullptr; for messages.
    [[nodiscard]] const FileEntry* at(int64_t offset) const;

   private:
    static constexpr uint32_t no_entry = UINT32_MAX;

    void put_in_order();
    class Boxes;
    void take_offsets(std::string_view sharding, Boxes& boxes);
    void check_ranges() const;
    [[nodiscard]] size_t slot_of(std::string_view name) const;

    std::string path_;
    int64_t size_ = 0;
    int64_t data_begin_ = 0;
    std::vector<uint32_t> crcs_;
    std::vector<FileEntry> entries_;
    // A hash table with open addressing, of indices into entries_, which never changes after parse.
    std::vector<uint32_t> by_name_;
};

}  // namespace tsr
