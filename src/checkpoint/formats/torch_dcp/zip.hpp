// The zip archives of torch.save, in their own file or one after the other in a .distcp file. Written for Tessera, as
// libraries lack two things: the byte offset of a stored entry, to read a tensor's bytes directly into their
// destination, and archives at an offset of a larger file that is written as one stream.
//
// Only the forms that torch.save writes are accepted: stored entries, no encryption, no comment, one disk; zip64 and
// data descriptors. Archives that two readers could understand differently are refused: central directory and local
// headers must agree, entries must not overlap, names must be unique and must not lead outside.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

// Reads small pieces of a part of a file through one buffer, so that neighbouring pieces cost one system call.
class PartReader {
   public:
    PartReader(File& file, const std::string& path, int64_t begin, int64_t size)
        : file_(file), path_(path), begin_(begin), size_(size) {}
    [[nodiscard]] int64_t size() const { return size_; }
    [[nodiscard]] int64_t begin() const { return begin_; }  // in the file
    [[nodiscard]] const std::string& path() const { return path_; }
    // Bytes of the part, valid until the next call. CORRUPT if they are outside of it.
    [[nodiscard]] std::string_view read(int64_t offset, int64_t count);
    [[noreturn]] void refuse(std::string_view why) const;

   private:
    File& file_;
    const std::string& path_;
    int64_t begin_;
    int64_t size_;
    std::string buffer_;
    int64_t buffer_begin_ = 0;
};

struct ZipEntry {
    std::string name;    // without the folder that all names share
    int64_t header = 0;  // offset of its local header in the archive
    int64_t size = 0;
    uint32_t crc = 0;
};

class ZipArchive {
   public:
    ZipArchive(ZipArchive&&) = default;  // not copied: by_name_ points into entries_
    ZipArchive& operator=(ZipArchive&&) = default;
    [[nodiscard]] static ZipArchive read(PartReader& part);

    [[nodiscard]] std::string_view folder() const { return folder_; }                // with '/'; may be empty
    [[nodiscard]] const std::vector<ZipEntry>& entries() const { return entries_; }  // in order of their offsets
    [[nodiscard]] const ZipEntry* find(std::string_view name) const;
    // The offset of the entry's data in the archive; checks its local header.
    [[nodiscard]] int64_t data_begin(PartReader& part, const ZipEntry& entry) const;
    // The contents of a small entry; checks its checksum.
    [[nodiscard]] std::string read_entry(PartReader& part, const ZipEntry& entry, int64_t max_size) const;
    // torch.save has an option to leave out checksums; then all are zero.
    [[nodiscard]] bool has_checksums() const { return has_checksums_; }

   private:
    ZipArchive() = default;
    void index_entries(const PartReader& part);

    std::string folder_;  // "archive/"
    std::vector<ZipEntry> entries_;
    std::unordered_map<std::string_view, size_t> by_name_;
    int64_t directory_ = 0;  // where data ends
    bool has_checksums_ = true;
};

// Generates the bytes around the data of a new archive: entries in order, each either a text or external data.
class ZipWriter {
   public:
    // Entries are named "<folder>/<name>", or "<name>" if the folder is empty. Data is aligned to 64 bytes, from 64 KiB
    // on to 4096, in a file where the archive begins at `begin`.
    ZipWriter(std::string folder, int64_t begin) : folder_(std::move(folder)), begin_(begin) {}
    void add(std::string_view name, std::string_view content);
    // Adds an entry of `head` followed by `size` bytes with the checksum `crc`, which the caller writes after
    // take_text() before the next call. Returns the entry's number.
    size_t add_data(std::string_view name, int64_t size, uint32_t crc, std::string_view head = {});
    void finish();
    // After finish(): the offsets in the archive of the two copies of the entry's checksum.
    [[nodiscard]] std::array<int64_t, 2> crc_places(size_t entry) const;
    // Takes out the text before the next data, or at the end.
    [[nodiscard]] std::string take_text();
    [[nodiscard]] int64_t size_bytes() const { return at_; }

   private:
    void header(std::string_view name, int64_t size, uint32_t crc);
    void put(std::string_view text);

    struct Written {
        std::string name;
        int64_t header;
        int64_t size;
        uint32_t crc;
        int64_t central = 0;  // its offset in the central directory
    };
    std::string folder_;
    int64_t begin_;
    std::string text_;
    int64_t at_ = 0;  // bytes so far, data included
    std::vector<Written> written_;
};

}  // namespace tsr
