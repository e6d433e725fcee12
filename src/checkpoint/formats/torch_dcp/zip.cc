#include "checkpoint/formats/torch_dcp/zip.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/crc32.hpp"
#include "base/error.hpp"
#include "base/json.hpp"

namespace tsr {

namespace {

constexpr uint32_t local_signature = 0x04034b50;
constexpr uint32_t central_signature = 0x02014b50;
constexpr uint32_t end_signature = 0x06054b50;
constexpr uint32_t end64_signature = 0x06064b50;
constexpr uint32_t locator_signature = 0x07064b50;
constexpr int64_t local_bytes = 30;
constexpr int64_t central_bytes = 46;
constexpr int64_t end_bytes = 22;
constexpr int64_t end64_bytes = 56;
constexpr int64_t locator_bytes = 20;
constexpr uint32_t all_ones = 0xffffffff;  // "see the zip64 field"
constexpr uint16_t zip64_tag = 1;
constexpr uint16_t padding_tag = 'F' | 'B' << 8;  // torch's
constexpr uint16_t flag_encrypted = 1;
constexpr uint16_t flag_descriptor = 8;  // sizes and checksum follow the data
constexpr uint16_t flag_utf8 = 0x800;
constexpr int64_t window_bytes = 4096;
constexpr uint64_t max_directory_bytes = 256 << 20;  // of a million tensors and more; a sparse file may claim any size
constexpr int64_t alignment = 64;
constexpr int64_t large_alignment = 4096;
constexpr int64_t large_bytes = 65536;

uint64_t number(std::string_view text, size_t at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= uint64_t{static_cast<uint8_t>(text[at + i])} << (8 * i);
    return value;
}
uint16_t u16(std::string_view text, size_t at) { return static_cast<uint16_t>(number(text, at, 2)); }
uint32_t u32(std::string_view text, size_t at) { return static_cast<uint32_t>(number(text, at, 4)); }
uint64_t u64(std::string_view text, size_t at) { return number(text, at, 8); }

// The zip64 field of an entry's extra fields: replaces each number that is all ones, in their fixed order.
void apply_zip64(const PartReader& part, std::string_view extra, std::initializer_list<uint64_t*> numbers) {
    while (extra.size() >= 4) {
        const uint16_t tag = u16(extra, 0);
        const uint16_t size = u16(extra, 2);
        if (size > extra.size() - 4) part.refuse("an extra field of its directory is too long");
        std::string_view field = extra.substr(4, size);
        if (tag == zip64_tag) {
            for (uint64_t* value : numbers) {
                if (*value != all_ones) continue;
                if (field.size() < 8) part.refuse("a zip64 field is too short");
                *value = u64(field, 0);
                field.remove_prefix(8);
            }
            return;
        }
        extra.remove_prefix(size_t{4} + size);
    }
}

void put_number(std::string& out, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
}
void put16(std::string& out, uint64_t value) { put_number(out, value, 2); }
void put32(std::string& out, uint64_t value) { put_number(out, value, 4); }
void put64(std::string& out, uint64_t value) { put_number(out, value, 8); }
uint64_t in_32(int64_t value) { return value < int64_t{all_ones} ? static_cast<uint64_t>(value) : all_ones; }

}  // namespace

std::string_view PartReader::read(int64_t offset, int64_t count) {
    if (offset < 0 || count < 0 || offset > size_ || count > size_ - offset) {
        refuse(fmt::format("it refers to {} bytes at {}, but has {}", count, offset, size_));
    }
    const auto buffered = static_cast<int64_t>(buffer_.size());
    if (offset < buffer_begin_ || offset + count > buffer_begin_ + buffered) {
        // Near the end, reads go backwards: first the directory, then the entries.
        const int64_t bytes = std::min(std::max(count, window_bytes), size_);
        buffer_begin_ = std::min(offset, size_ - bytes);
        buffer_.resize(static_cast<size_t>(bytes));
        read_all(file_, path_, std::as_writable_bytes(std::span(buffer_)), begin_ + buffer_begin_);
    }
    return std::string_view(buffer_).substr(static_cast<size_t>(offset - buffer_begin_), static_cast<size_t>(count));
}

void PartReader::refuse(std::string_view why) const {
    throw Error(Code::corrupt, fmt::format("{}: the zip archive at byte {}: {}", path_, begin_, why));
}

namespace {

// Where the central directory is, and how many entries it has.
struct Directory {
    uint64_t count = 0;
    uint64_t size = 0;
    uint64_t begin = 0;
    int64_t end = 0;
};

// Takes the numbers of a zip64 record, if there is one before the end record.
void take_zip64(PartReader& part, Directory& directory) {
    if (directory.end < locator_bytes) return;
    const std::string locator(part.read(directory.end - locator_bytes, locator_bytes));
    if (u32(locator, 0) != locator_signature) return;
    const uint64_t at = u64(locator, 8);
    if (directory.end < locator_bytes + end64_bytes ||
        at != static_cast<uint64_t>(directory.end - locator_bytes - end64_bytes)) {
        part.refuse("its zip64 record is not at the stated offset");
    }
    directory.end = static_cast<int64_t>(at);
    const std::string_view end64 = part.read(directory.end, end64_bytes);
    if (u32(end64, 0) != end64_signature || u64(end64, 4) != static_cast<uint64_t>(end64_bytes - 12) ||
        u32(end64, 16) != 0 || u32(end64, 20) != 0 || u64(end64, 24) != u64(end64, 32)) {
        part.refuse("its zip64 record is damaged");
    }
    const bool same = (directory.count == 0xffff || directory.count == u64(end64, 32)) &&
                      (directory.size == all_ones || directory.size == u64(end64, 40)) &&
                      (directory.begin == all_ones || directory.begin == u64(end64, 48));
    if (!same) part.refuse("its two end records differ");
    directory.count = u64(end64, 32);
    directory.size = u64(end64, 40);
    directory.begin = u64(end64, 48);
}

Directory find_directory(PartReader& part) {
    if (part.size() < end_bytes) part.refuse(fmt::format("{} bytes are too few for an archive", part.size()));
    // Read the last bytes at once: they mostly contain the whole directory.
    (void)part.read(std::max<int64_t>(part.size() - window_bytes, 0), std::min(part.size(), window_bytes));
    Directory directory;
    directory.end = part.size() - end_bytes;
    const std::string end(part.read(directory.end, end_bytes));
    if (u32(end, 0) != end_signature || u16(end, 20) != 0) {
        part.refuse("it does not end like a torch.save archive: it was truncated or overwritten");
    }
    directory.count = u16(end, 10);
    directory.size = u32(end, 12);
    directory.begin = u32(end, 16);
    if (u16(end, 4) != 0 || u16(end, 6) != 0 || u16(end, 8) != directory.count) part.refuse("it spans several disks");
    take_zip64(part, directory);
    const auto end_of_directory = static_cast<uint64_t>(directory.end);
    if (directory.begin > end_of_directory || directory.size != end_of_directory - directory.begin)
        part.refuse("its directory is not at the stated offset");
    if (directory.size > max_directory_bytes) {
        throw Error(Code::unsupported,
                    fmt::format("{}: the zip archive at byte {}: its directory has {} bytes; at most {} are supported",
                                part.path(), part.begin(), directory.size, max_directory_bytes));
    }
    if (directory.count > directory.size / static_cast<uint64_t>(central_bytes)) {
        part.refuse(fmt::format("its directory of {} bytes cannot hold {} entries", directory.size, directory.count));
    }
    return directory;
}

void check_entry_form(const PartReader& part, std::string_view name, std::string_view record) {
    const uint16_t flags = u16(record, 8);
    const uint16_t method = u16(record, 10);
    if ((flags & flag_encrypted) != 0 || (flags & ~(flag_descriptor | flag_utf8)) != 0) {
        throw Error(Code::unsupported, fmt::format("{}: the zip archive at byte {}: entry '{}' is encrypted or in a "
                                                   "form that torch.save does not write (flags {:#06x})",
                                                   part.path(), part.begin(), name, flags));
    }
    if (method != 0) {
        throw Error(Code::unsupported,
                    fmt::format("{}: the zip archive at byte {}: entry '{}' is compressed (method "
                                "{}); only stored entries are supported: save it again with torch.save",
                                part.path(), part.begin(), name, method));
    }
}

// Takes the entry at the begin of `rest`, the `number`-th, with its full name.
ZipEntry take_entry(const PartReader& part, const Directory& directory, uint64_t number, std::string_view& rest) {
    if (rest.size() < central_bytes || u32(rest, 0) != central_signature) part.refuse("its directory is damaged");
    const size_t name_bytes = u16(rest, 28);
    const size_t extra_bytes = u16(rest, 30);
    const size_t all_bytes = central_bytes + name_bytes + extra_bytes + u16(rest, 32);
    if (all_bytes > rest.size()) part.refuse("its directory is damaged");
    const std::string_view name = rest.substr(central_bytes, name_bytes);
    const auto refuse_entry = [&](std::string_view why) {
        part.refuse(fmt::format("entry {} ('{}') {}", number, is_utf8(name) ? name.substr(0, 200) : "?", why));
    };
    if (!is_utf8(name) || name.find('\0') != std::string_view::npos || name.starts_with('/') ||
        fmt::format("/{}/", name).find("/../") != std::string::npos) {
        refuse_entry("has an invalid name");
    }
    check_entry_form(part, name, rest);
    uint64_t stored = u32(rest, 20);
    uint64_t plain = u32(rest, 24);
    uint64_t header = u32(rest, 42);
    apply_zip64(part, rest.substr(central_bytes + name_bytes, extra_bytes), {&plain, &stored, &header});
    if (stored != plain) refuse_entry("has different stored and original sizes");
    if (u16(rest, 34) != 0) refuse_entry("is on another disk");
    const uint64_t least = static_cast<uint64_t>(local_bytes) + name_bytes;
    if (header > directory.begin || directory.begin - header < least || plain > directory.begin - header - least)
        refuse_entry("is outside the archive");
    ZipEntry entry{std::string(name), static_cast<int64_t>(header), static_cast<int64_t>(plain), u32(rest, 16)};
    rest.remove_prefix(all_bytes);
    return entry;
}

}  // namespace

ZipArchive ZipArchive::read(PartReader& part) {
    const Directory directory = find_directory(part);
    ZipArchive archive;
    archive.directory_ = static_cast<int64_t>(directory.begin);
    archive.entries_.reserve(directory.count);
    const std::string text(part.read(archive.directory_, static_cast<int64_t>(directory.size)));
    std::string_view rest = text;
    archive.has_checksums_ = false;
    for (uint64_t i = 0; i < directory.count; ++i) {
        ZipEntry entry = take_entry(part, directory, i, rest);
        const size_t slash = entry.name.find('/');
        if (i == 0) archive.folder_ = slash == std::string::npos ? "" : entry.name.substr(0, slash + 1);
        if (!entry.name.starts_with(archive.folder_) || entry.name.size() == archive.folder_.size()) {
            part.refuse(fmt::format("entry {} ('{}') is not in the same folder as the others", i,
                                    std::string_view(entry.name).substr(0, 200)));
        }
        entry.name.erase(0, archive.folder_.size());
        archive.has_checksums_ = archive.has_checksums_ || entry.crc != 0;
        archive.entries_.push_back(std::move(entry));
    }
    if (!rest.empty()) part.refuse("its directory has bytes after its last entry");
    archive.index_entries(part);
    return archive;
}

// Sorts the entries by their places and finds them by name from here on.
void ZipArchive::index_entries(const PartReader& part) {
    std::ranges::sort(entries_, {}, &ZipEntry::header);
    int64_t used = 0;
    for (size_t i = 0; i < entries_.size(); ++i) {
        const ZipEntry& entry = entries_[i];
        if (entry.header < used) part.refuse(fmt::format("entry '{}' overlaps the one before it", entry.name));
        used = entry.header + local_bytes + static_cast<int64_t>(folder_.size() + entry.name.size()) + entry.size;
        if (!by_name_.emplace(entry.name, i).second) {
            part.refuse(fmt::format("it has the entry '{}' twice", entry.name));
        }
    }
}

const ZipEntry* ZipArchive::find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &entries_[found->second];
}

int64_t ZipArchive::data_begin(PartReader& part, const ZipEntry& entry) const {
    const auto refuse = [&](std::string_view why) { part.refuse(fmt::format("entry '{}' {}", entry.name, why)); };
    const std::string name = folder_ + entry.name;
    const std::string_view header = part.read(entry.header, local_bytes + static_cast<int64_t>(name.size()));
    if (u32(header, 0) != local_signature || header.substr(local_bytes) != name || u16(header, 26) != name.size()) {
        refuse("has a header that differs from the directory");
    }
    const uint16_t flags = u16(header, 6);
    const bool follows = (flags & flag_descriptor) != 0;
    if ((flags & ~(flag_descriptor | flag_utf8)) != 0 || u16(header, 8) != 0)
        refuse("has a form that differs from the directory");
    const uint32_t crc = u32(header, 14);
    uint64_t stored = u32(header, 18);
    uint64_t plain = u32(header, 22);
    const int64_t extra_bytes = u16(header, 28);
    const int64_t begin = entry.header + local_bytes + static_cast<int64_t>(name.size()) + extra_bytes;
    apply_zip64(part, std::string(part.read(begin - extra_bytes, extra_bytes)), {&plain, &stored});
    const auto size = static_cast<uint64_t>(entry.size);
    const bool same =
        (plain == size && stored == size && (crc == entry.crc || follows)) || (follows && plain == 0 && stored == 0);
    if (!same) refuse("has a size or checksum that differs from the directory");
    const size_t next = by_name_.at(entry.name) + 1;
    const int64_t limit = next < entries_.size() ? entries_[next].header : directory_;
    if (begin > limit || entry.size > limit - begin) refuse("overlaps the next entry");
    return begin;
}

std::string ZipArchive::read_entry(PartReader& part, const ZipEntry& entry, int64_t max_size) const {
    if (entry.size > max_size) {
        throw Error(Code::unsupported,
                    fmt::format("{}: the zip archive at byte {}: entry '{}' has {} bytes; at most {} are "
                                "supported",
                                part.path(), part.begin(), entry.name, entry.size, max_size));
    }
    const int64_t begin = data_begin(part, entry);
    std::string content(part.read(begin, entry.size));
    if (has_checksums_ && crc32(content) != entry.crc)
        part.refuse(fmt::format("entry '{}' does not match its checksum", entry.name));
    return content;
}

void ZipWriter::put(std::string_view text) {
    text_ += text;
    at_ += static_cast<int64_t>(text.size());
}

void ZipWriter::header(std::string_view name, int64_t size, uint32_t crc) {
    const std::string full = folder_.empty() ? std::string(name) : fmt::format("{}/{}", folder_, name);
    written_.push_back({full, at_, size, crc});
    const bool wide = size >= int64_t{all_ones};
    const int64_t unit = size >= large_bytes ? large_alignment : alignment;
    const int64_t before = begin_ + at_ + local_bytes + static_cast<int64_t>(full.size()) + (wide ? 20 : 0) + 4;
    const int64_t padding = (unit - before % unit) % unit;
    std::string out;
    put32(out, local_signature);
    put16(out, wide ? 45 : 20);
    put16(out, flag_utf8);
    put16(out, 0);
    put32(out, 0);  // no time: equal content gives equal bytes
    put32(out, crc);
    put32(out, in_32(size));
    put32(out, in_32(size));
    put16(out, full.size());
    put16(out, static_cast<uint64_t>((wide ? 20 : 0) + 4 + padding));
    out += full;
    if (wide) {
        put16(out, zip64_tag);
        put16(out, 16);
        put64(out, static_cast<uint64_t>(size));
        put64(out, static_cast<uint64_t>(size));
    }
    put16(out, padding_tag);
    put16(out, static_cast<uint64_t>(padding));
    out.append(static_cast<size_t>(padding), 'Z');
    put(out);
}

void ZipWriter::add(std::string_view name, std::string_view content) {
    header(name, static_cast<int64_t>(content.size()), crc32(content));
    put(content);
}

size_t ZipWriter::add_data(std::string_view name, int64_t size, uint32_t crc, std::string_view head) {
    const uint32_t whole = head.empty() ? crc : crc32_joined(crc32(head), crc, size);
    header(name, static_cast<int64_t>(head.size()) + size, whole);
    put(head);
    at_ += size;
    return written_.size() - 1;
}

std::array<int64_t, 2> ZipWriter::crc_places(size_t entry) const {
    // Each form of a header begins with words of fixed sizes.
    return {written_[entry].header + 14, written_[entry].central + 16};
}

void ZipWriter::finish() {
    const int64_t begin = at_;
    std::string out;
    for (Written& entry : written_) {
        entry.central = begin + static_cast<int64_t>(out.size());
        const bool wide_size = entry.size >= int64_t{all_ones};
        const bool wide_header = entry.header >= int64_t{all_ones};
        const int extra = (wide_size ? 16 : 0) + (wide_header ? 8 : 0);
        put32(out, central_signature);
        put16(out, 45);
        put16(out, extra > 0 ? 45 : 20);
        put16(out, flag_utf8);
        put16(out, 0);
        put32(out, 0);
        put32(out, entry.crc);
        put32(out, in_32(entry.size));
        put32(out, in_32(entry.size));
        put16(out, entry.name.size());
        put16(out, static_cast<uint64_t>(extra > 0 ? extra + 4 : 0));
        put16(out, 0);
        put16(out, 0);
        put16(out, 0);
        put32(out, 0);
        put32(out, in_32(entry.header));
        out += entry.name;
        if (extra == 0) continue;
        put16(out, zip64_tag);
        put16(out, static_cast<uint64_t>(extra));
        if (wide_size) put64(out, static_cast<uint64_t>(entry.size));
        if (wide_size) put64(out, static_cast<uint64_t>(entry.size));
        if (wide_header) put64(out, static_cast<uint64_t>(entry.header));
    }
    const auto directory = static_cast<int64_t>(out.size());
    if (begin >= int64_t{all_ones} || directory >= int64_t{all_ones} || written_.size() >= 0xffff) {
        put32(out, end64_signature);
        put64(out, static_cast<uint64_t>(end64_bytes - 12));
        put16(out, 45);
        put16(out, 45);
        put32(out, 0);
        put32(out, 0);
        put64(out, written_.size());
        put64(out, written_.size());
        put64(out, static_cast<uint64_t>(directory));
        put64(out, static_cast<uint64_t>(begin));
        put32(out, locator_signature);
        put32(out, 0);
        put64(out, static_cast<uint64_t>(begin + directory));
        put32(out, 1);
    }
    put32(out, end_signature);
    put32(out, 0);
    const uint64_t count = std::min<uint64_t>(written_.size(), 0xffff);
    put16(out, count);
    put16(out, count);
    put32(out, in_32(directory));
    put32(out, in_32(begin));
    put16(out, 0);
    put(out);
}

std::string ZipWriter::take_text() { return std::exchange(text_, std::string()); }

}  // namespace tsr
