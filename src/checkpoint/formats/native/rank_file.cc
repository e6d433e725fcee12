#include "checkpoint/formats/native/rank_file.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <functional>
#include <optional>
#include <unordered_map>

#include "base/brief.hpp"
#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/json_view.hpp"
#include "base/round_up.hpp"
#include "checkpoint/formats/safetensors/header.hpp"

namespace tsr {

namespace {

constexpr size_t length_word = 8;
constexpr size_t least_entry_bytes = 48;  // of a tensor in a header
constexpr size_t longest_why = 4096;
static_assert(block_bytes % direct_alignment == 0);

void append_number(std::string& out, int64_t number) {
    char digits[24];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

void append_numbers(std::string& out, const Dims& numbers) {
    out += '[';
    for (int d = 0; d < numbers.ndim(); ++d) {
        if (d > 0) out += ',';
        append_number(out, numbers[d]);
    }
    out += ']';
}

[[noreturn]] void corrupt(const std::string& path, std::string_view why) {
    throw Error(Code::corrupt, fmt::format("{}: {}", path, brief(why, longest_why)));
}

Dims dims_of(JsonView json) {
    std::array<int64_t, max_ndim> numbers{};
    size_t count = 0;
    json.for_each_item([&](JsonView item) {
        if (count == numbers.size()) {
            throw Error(Code::corrupt, fmt::format("more than {} dimensions", max_ndim));
        }
        const int64_t number = item.as_int();
        if (number < 0) throw Error(Code::corrupt, fmt::format("negative number {}", number));
        numbers[count++] = number;
    });
    return Dims(std::span(numbers).first(count));
}

}  // namespace

// Stores each distinct box once. Neighbours mostly share one.
class RankFile::Boxes {
   public:
    const SharedBox& operator()(const Box& box) {
        if (last_ != nullptr && **last_ == box) return *last_;
        SharedBox& known = known_[key_of(box)];
        if (known == nullptr) known = std::make_shared<const Box>(box);
        last_ = &known;
        return known;
    }

   private:
    const std::string& key_of(const Box& box) {
        key_.clear();
        for (const Dims& dims : {box.offsets, box.sizes}) {
            key_ += static_cast<char>(dims.ndim());
            key_.append(reinterpret_cast<const char*>(dims.data()), static_cast<size_t>(dims.ndim()) * sizeof(int64_t));
        }
        return key_;
    }

    std::unordered_map<std::string, SharedBox> known_;
    const SharedBox* last_ = nullptr;
    std::string key_;
};

namespace {

// The header's entry of one tensor. Its offsets are elsewhere.
template <class Boxes>
FileEntry entry_of(std::string_view name, JsonView json, Boxes& boxes) {
    const auto [dtype_name, shape, range] = json.at<3>({"dtype", "shape", "data_offsets"});
    const auto dtype = dtype_from_safetensors(dtype_name.as_string());
    if (!dtype) {
        throw Error(Code::corrupt, fmt::format("tensor '{}' has the unknown dtype {}", name, dtype_name.as_string()));
    }
    const Box box{{}, dims_of(shape)};
    FileEntry entry{std::string(name), *dtype, boxes(box), 0, 0};
    std::array<int64_t, 2> bytes{};
    size_t count = 0;
    range.for_each_item([&](JsonView item) {
        if (count < 2) bytes[count] = item.as_int();
        ++count;
    });
    if (count != 2) throw Error(Code::corrupt, fmt::format("tensor '{}' has no byte range", name));
    entry.begin = bytes[0];
    entry.end = bytes[1];
    try {
        check_shape(box.sizes, entry.dtype, "it");
    } catch (const Error& error) {
        throw Error(Code::corrupt, fmt::format("tensor '{}': {}", name, error.what()));
    }
    return entry;
}

std::vector<uint32_t> crcs_of(std::string_view digits, int64_t data_bytes) {
    const auto blocks = static_cast<size_t>(round_up(data_bytes, block_bytes) / block_bytes);
    if (digits.size() != 8 * blocks) {
        throw Error(Code::corrupt, fmt::format("it has {} checksum digits for {} blocks", digits.size(), blocks));
    }
    std::vector<uint32_t> crcs;
    crcs.reserve(blocks);
    for (size_t block = 0; block < blocks; ++block) {
        const auto crc = from_hex8(digits.substr(8 * block, 8));
        if (!crc) throw Error(Code::corrupt, fmt::format("the checksum of block {} is not a number", block));
        crcs.push_back(*crc);
    }
    return crcs;
}

}  // namespace

FileHeader make_header(std::span<const Piece> pieces, std::string_view save_id) {
    FileHeader header;
    size_t room = 8192;  // an upper bound: unused memory is never resident
    for (const Piece& piece : pieces) {
        check_safetensors_key(piece.name);
        if (!is_in_safetensors(piece.dtype)) {
            throw Error(
                Code::unsupported,
                fmt::format("tensor '{}' is {}, which safetensors does not support; use the format torch_dcp, or "
                            "save a view of it as f64",
                            piece.name, name_of(piece.dtype)));
        }
        header.data_bytes += piece.size_bytes();
        room += 2 * piece.name.size() + 160 + 24 * static_cast<size_t>(piece.box->sizes.ndim());
    }
    std::string& text = header.text;
    text.reserve(room + 8 * header.block_count());
    text.assign(length_word, '\0');
    text += R"({"__metadata__":{"tessera":"{\"save_id\":\")";
    text += save_id;
    text += fmt::format(R"(\",\"block_bytes\":{},\"crc32c\":\")", block_bytes);
    header.crc_offset = text.size();
    text.append(8 * header.block_count(), '0');
    text += R"(\"}","DCP_SHARDING_INFO":"{)";
    std::string sharding;  // of one piece: JSON within a JSON string
    for (const Piece& piece : pieces) {
        sharding.clear();
        if (&piece != &pieces.front()) sharding += ',';
        append_json_string(sharding, piece.name);
        sharding += ":{\"saved_offsets\":";
        append_numbers(sharding, piece.box->offsets);
        sharding += '}';
        append_json_escaped(text, sharding);
    }
    text += R"(}","DCP_VERSION":"1.0","format":"pt"})";
    int64_t end = 0;
    for (const Piece& piece : pieces) {
        text += ",\n";
        append_json_string(text, piece.name);
        text += ":{\"dtype\":\"";
        text += safetensors_name(piece.dtype);
        text += "\",\"shape\":";
        append_numbers(text, piece.box->sizes);
        text += ",\"data_offsets\":[";
        append_number(text, end);
        end += piece.size_bytes();
        text += ',';
        append_number(text, end);
        text += "]}";
    }
    text += '}';
    text.append(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), direct_alignment)) - text.size(), ' ');
    const auto json_bytes = static_cast<int64_t>(text.size() - length_word);
    if (json_bytes > max_header_bytes) {
        throw Error(
            Code::unsupported,
            fmt::format("a rank file's header would have {} bytes, but readers accept at most {}: too many tensors "
                        "on one rank",
                        json_bytes, max_header_bytes));
    }
    for (size_t i = 0; i < length_word; ++i) text[i] = static_cast<char>(json_bytes >> (8 * i) & 0xff);
    return header;
}

void FileHeader::set_crcs(std::span<const uint32_t> crcs) {
    for (size_t block = 0; block < crcs.size(); ++block) hex8_to(crcs[block], text.data() + crc_offset + 8 * block);
}

RankFile RankFile::read(FileSystem& files, const std::string& path, int64_t size, uint32_t crc,
                        std::string_view save_id) {
    std::unique_ptr<File> file;
    try {
        file = open_file(files, path, OpenMode::read);
    } catch (const Error& error) {
        if (error.code() != Code::not_found) throw;
        throw Error(Code::corrupt, fmt::format("{} is missing", path)).caused_by(error);
    }
    const int64_t found = file->size();
    if (found < 0) throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-found));
    if (found != size) {
        refuse_lfs_pointer(*file, path);
        corrupt(path, fmt::format("it has {} bytes, expected {}: it was {}", found, size,
                                  found < size ? "truncated" : "changed after the save"));
    }
    if (size < static_cast<int64_t>(length_word)) corrupt(path, "it is too short for a header");
    std::array<std::byte, length_word> word{};
    read_all(*file, path, word, 0);
    uint64_t json_bytes = 0;
    for (size_t i = 0; i < length_word; ++i) json_bytes |= std::to_integer<uint64_t>(word[i]) << (8 * i);
    if (json_bytes > static_cast<uint64_t>(std::min(max_header_bytes, size - static_cast<int64_t>(length_word)))) {
        corrupt(path, fmt::format("its header size of {} bytes is invalid (byte 0 of the file)", json_bytes));
    }
    const AlignedBuffer memory(length_word + json_bytes);
    const std::span<std::byte> bytes = memory.first(memory.size());
    std::copy(word.begin(), word.end(), bytes.begin());
    read_all(*file, path, bytes.subspan(length_word), length_word);
    const std::string_view header(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (crc32c(header) != crc) {
        corrupt(path,
                fmt::format("its header (bytes 0 to {}) does not match the checksum in the manifest", header.size()));
    }
    return parse(header, path, size, save_id);
}

RankFile RankFile::parse(std::string_view header, const std::string& path, int64_t size, std::string_view save_id) {
    RankFile file;
    file.path_ = path;
    file.size_ = size;
    file.data_begin_ = static_cast<int64_t>(header.size());
    if (header.size() < length_word || size < file.data_begin_) corrupt(path, "it is too short for its header");
    if (file.data_begin_ % direct_alignment != 0) {
        corrupt(path, fmt::format("its data begins at byte {}, which is not a multiple of {}", file.data_begin_,
                                  direct_alignment));
    }
    try {
        Boxes boxes;
        std::optional<std::string> sharding;
        file.entries_.reserve(std::min(static_cast<size_t>(std::count(header.begin(), header.end(), '\n')),
                                       header.size() / least_entry_bytes));  // as this library writes them
        for_each_member_of(header.substr(length_word), "the header", [&](std::string_view key, JsonView value) {
            if (key != safetensors_metadata_key) {
                file.entries_.push_back(entry_of(key, value, boxes));
                return;
            }
            if (sharding) throw Error(Code::corrupt, "it has __metadata__ twice");
            const auto [tessera, offsets] = value.at<2>({"tessera", "DCP_SHARDING_INFO"});
            sharding = offsets.as_string();
            const JsonText own(tessera.as_string(), "__metadata__.tessera");
            const auto [id, crc_block_bytes, digits] = own.root().at<3>({"save_id", "block_bytes", "crc32c"});
            if (id.as_string() != save_id) {
                throw Error(Code::corrupt, fmt::format("it belongs to save {}, not to {}", id.as_string(), save_id));
            }
            if (crc_block_bytes.as_int() != block_bytes) {
                throw Error(Code::corrupt, fmt::format("its checksum blocks have {} bytes, expected {}",
                                                       crc_block_bytes.as_int(), block_bytes));
            }
            file.crcs_ = crcs_of(digits.as_string(), file.data_bytes());
        });
        if (!sharding) throw Error(Code::corrupt, "it has no __metadata__");
        file.put_in_order();
        file.take_offsets(*sharding, boxes);
        file.check_ranges();
    } catch (const Error& error) {
        if (error.code() != Code::corrupt) throw;
        corrupt(path, error.what());
    }
    return file;
}

// Sorts by offset, the order in which this library writes, and indexes by name.
void RankFile::put_in_order() {
    const auto before = [](const FileEntry& a, const FileEntry& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    };
    if (!std::is_sorted(entries_.begin(), entries_.end(), before)) std::sort(entries_.begin(), entries_.end(), before);
    by_name_.assign(std::bit_ceil(2 * entries_.size() + 1), no_entry);
    for (size_t i = 0; i < entries_.size(); ++i) {
        uint32_t& slot = by_name_[slot_of(entries_[i].name)];
        if (slot != no_entry) throw Error(Code::corrupt, fmt::format("tensor '{}' occurs twice", entries_[i].name));
        slot = static_cast<uint32_t>(i);
    }
}

// Sets where each part begins in its whole tensor. This library writes the offsets in the order of the tensors.
void RankFile::take_offsets(std::string_view sharding, Boxes& boxes) {
    std::vector<bool> taken(entries_.size(), false);
    size_t count = 0;
    for_each_member_of(sharding, "DCP_SHARDING_INFO", [&](std::string_view name, JsonView value) {
        const size_t next = count++;
        const bool as_written = next < entries_.size() && entries_[next].name == name;
        const size_t at = as_written ? next : by_name_[slot_of(name)];
        if (at >= entries_.size() || taken[at]) {
            throw Error(Code::corrupt, fmt::format("offsets of '{}' are listed twice, or it is not a tensor", name));
        }
        taken[at] = true;
        SharedBox& box = entries_[at].box;
        box = boxes({dims_of(value.at<1>({"saved_offsets"})[0]), box->sizes});
    });
    if (count != entries_.size()) {
        throw Error(Code::corrupt, fmt::format("it has {} tensors, but offsets of {}", entries_.size(), count));
    }
}

// Checks that there are no gaps, no overlaps, and nothing beyond the file.
void RankFile::check_ranges() const {
    int64_t end = 0;
    for (const FileEntry& entry : entries_) {
        const auto itemsize = static_cast<int64_t>(size_of(entry.dtype));
        const Box& box = *entry.box;
        if (box.offsets.ndim() != box.sizes.ndim() || entry.begin < 0 || entry.end < entry.begin ||
            entry.end > data_bytes() || entry.end - entry.begin != box.numel() * itemsize ||
            entry.begin % itemsize != 0) {  // NOLINT(clang-analyzer-core.DivideZero): every dtype has a size
            throw Error(Code::corrupt, fmt::format("tensor '{}' of shape {} has the invalid byte range {} to {} of {}",
                                                   entry.name, box.sizes.str(), entry.begin, entry.end, data_bytes()));
        }
        if (entry.begin != end) {
            throw Error(Code::corrupt, fmt::format("tensor '{}' begins at byte {} of the data, expected {}", entry.name,
                                                   entry.begin, end));
        }
        end = entry.end;
    }
    if (end != data_bytes()) {
        throw Error(Code::corrupt, fmt::format("its tensors end at byte {} of {} bytes of data", end, data_bytes()));
    }
}

// The slot of the name, or the empty slot where it would be. There are at least twice as many slots as tensors.
size_t RankFile::slot_of(std::string_view name) const {
    size_t slot = std::hash<std::string_view>{}(name);
    for (;; ++slot) {
        slot &= by_name_.size() - 1;
        if (by_name_[slot] == no_entry || entries_[by_name_[slot]].name == name) return slot;
    }
}

const FileEntry* RankFile::find(std::string_view name, const FileEntry* before) const {
    if (before != nullptr && before + 1 != entries_.data() + entries_.size() && before[1].name == name) {
        return before + 1;
    }
    const uint32_t found = by_name_[slot_of(name)];
    return found == no_entry ? nullptr : &entries_[found];
}

const FileEntry* RankFile::at(int64_t offset) const {
    const auto after = std::upper_bound(entries_.begin(), entries_.end(), offset,
                                        [](int64_t value, const FileEntry& entry) { return value < entry.begin; });
    if (after == entries_.begin()) return nullptr;
    const FileEntry& entry = *(after - 1);
    return offset < entry.end ? &entry : nullptr;
}

}  // namespace tsr
