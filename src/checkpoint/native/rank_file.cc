#include "checkpoint/native/rank_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/round_up.hpp"

namespace tsr {

namespace {

constexpr size_t length_word = 8;
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
    throw Error(Code::corrupt, fmt::format("{}: {}", path, why));
}

Dims dims_of(const Json& json) {
    const Json::Array& numbers = json.as_array();
    if (numbers.size() > static_cast<size_t>(max_ndim)) {
        throw Error(Code::corrupt, fmt::format("{} dimensions; at most {} are supported", numbers.size(), max_ndim));
    }
    std::vector<int64_t> values;
    for (const Json& number : numbers) {
        if (number.as_int() < 0) throw Error(Code::corrupt, fmt::format("the negative number {}", number.as_int()));
        values.push_back(number.as_int());
    }
    return Dims(values);
}

}  // namespace

std::string rank_file_name(int rank, int index) {
    return index == 0 ? fmt::format("rank-{:05}.safetensors", rank)
                      : fmt::format("rank-{:05}.{}.safetensors", rank, index);
}

bool is_rank_file_name(std::string_view name) {
    constexpr std::string_view begin = "rank-";
    constexpr std::string_view end = ".safetensors";
    if (name.size() > 64 || !name.starts_with(begin) || !name.ends_with(end)) return false;
    if (name.size() < begin.size() + end.size()) return false;
    std::string_view middle = name.substr(begin.size(), name.size() - begin.size() - end.size());
    const auto digits = [](std::string_view text) {
        return !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string_view::npos;
    };
    if (const size_t dot = middle.find('.'); dot != std::string_view::npos) {
        if (!digits(middle.substr(dot + 1))) return false;
        middle = middle.substr(0, dot);
    }
    return middle.size() >= 5 && digits(middle);
}

void order_pieces(std::vector<Piece>& pieces) {
    const auto key = [](const Piece& piece) {
        const int64_t bytes = piece.size_bytes();
        // Empty tensors first of all: readers sort by offsets, and [0, 0] comes before [0, n].
        return std::tuple(bytes != 0, bytes % direct_alignment != 0, -static_cast<int64_t>(size_of(piece.dtype)),
                          -bytes, piece.name);
    };
    std::sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) { return key(a) < key(b); });
}

FileHeader make_header(std::span<const Piece> pieces, std::string_view save_id) {
    FileHeader header;
    std::string sharding = "{";
    std::string entries;
    for (const Piece& piece : pieces) {
        if (!is_in_safetensors(piece.dtype)) {
            throw Error(Code::unsupported,
                        fmt::format("tensor '{}' is {}, which safetensors files cannot hold; save in the format "
                                    "torch_dcp, or a view of it as f64",
                                    piece.name, name_of(piece.dtype)));
        }
        if (sharding.size() > 1) sharding += ',';
        append_json_string(sharding, piece.name);
        sharding += ":{\"saved_offsets\":";
        append_numbers(sharding, piece.box.offsets);
        sharding += '}';

        entries += ",\n";
        append_json_string(entries, piece.name);
        entries += ":{\"dtype\":\"";
        entries += safetensors_name(piece.dtype);
        entries += "\",\"shape\":";
        append_numbers(entries, piece.box.sizes);
        entries += ",\"data_offsets\":[";
        append_number(entries, header.data_bytes);
        header.data_bytes += piece.size_bytes();
        entries += ',';
        append_number(entries, header.data_bytes);
        entries += "]}";
    }
    sharding += '}';

    std::string& text = header.text;
    text.assign(length_word, '\0');
    text += R"({"__metadata__":{"tessera":"{\"save_id\":\")";
    text += save_id;
    text += fmt::format(R"(\",\"block_bytes\":{},\"crc32c\":\")", block_bytes);
    header.crc_offset = text.size();
    text.append(8 * header.block_count(), '0');
    text += R"(\"}","DCP_SHARDING_INFO":)";
    append_json_string(text, sharding);
    text += R"(,"DCP_VERSION":"1.0","format":"pt"})";
    text += entries;
    text += '}';
    text.append(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), direct_alignment)) - text.size(), ' ');
    const auto json_bytes = static_cast<int64_t>(text.size() - length_word);
    if (json_bytes > max_header_bytes) {
        throw Error(
            Code::unsupported,
            fmt::format("a rank file's header would have {} bytes, and readers take at most {}: too many tensors "
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
    if (found < 0) throw os_error(fmt::format("cannot look at {}", path), static_cast<int>(-found));
    if (found != size) {
        corrupt(path, fmt::format("it has {} bytes, the manifest says {}: it was {}", found, size,
                                  found < size ? "truncated" : "changed after the save"));
    }
    if (size < static_cast<int64_t>(length_word)) corrupt(path, "it is too short for a header");
    std::string header(length_word, '\0');
    read_all(*file, path, std::as_writable_bytes(std::span(header)), 0);
    uint64_t json_bytes = 0;
    for (size_t i = 0; i < length_word; ++i) {
        json_bytes |= uint64_t{static_cast<unsigned char>(header[i])} << (8 * i);
    }
    if (json_bytes > static_cast<uint64_t>(std::min(max_header_bytes, size - static_cast<int64_t>(length_word)))) {
        corrupt(path, fmt::format("its header claims {} bytes (byte 0 of the file)", json_bytes));
    }
    header.resize(length_word + json_bytes);
    read_all(*file, path, std::as_writable_bytes(std::span(header).subspan(length_word)), length_word);
    if (crc32c(header) != crc) {
        corrupt(path, fmt::format("its header (bytes 0 to {}) fails the checksum in the manifest", header.size()));
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
        corrupt(path,
                fmt::format("its data begins at byte {}, not at a multiple of {}", file.data_begin_, direct_alignment));
    }
    try {
        const Json json = Json::parse(header.substr(length_word), "the header");
        const Json& metadata = json.at("__metadata__");
        const Json own = Json::parse(metadata.at("tessera").as_string(), "__metadata__.tessera");
        if (own.at("save_id").as_string() != save_id) {
            throw Error(Code::corrupt,
                        fmt::format("it belongs to the save {}, not to {}", own.at("save_id").as_string(), save_id));
        }
        if (own.at("block_bytes").as_int() != block_bytes) {
            throw Error(Code::corrupt, fmt::format("its checksums are of blocks of {} bytes; {} are known",
                                                   own.at("block_bytes").as_int(), block_bytes));
        }
        const std::string& digits = own.at("crc32c").as_string();
        const auto blocks = static_cast<size_t>(round_up(file.data_bytes(), block_bytes) / block_bytes);
        if (digits.size() != 8 * blocks) {
            throw Error(Code::corrupt, fmt::format("{} digits of checksums for {} blocks", digits.size(), blocks));
        }
        file.crcs_.reserve(blocks);
        for (size_t block = 0; block < blocks; ++block) {
            const auto crc = from_hex8(std::string_view(digits).substr(8 * block, 8));
            if (!crc) throw Error(Code::corrupt, fmt::format("the checksum of block {} is no number", block));
            file.crcs_.push_back(*crc);
        }

        const Json sharding = Json::parse(metadata.at("DCP_SHARDING_INFO").as_string(), "DCP_SHARDING_INFO");
        std::unordered_map<std::string_view, const Json*> offsets;
        offsets.reserve(sharding.as_object().size());
        for (const Json::Member& member : sharding.as_object()) offsets.emplace(member.key, &member.value);
        if (json.as_object().size() != offsets.size() + 1) {
            throw Error(Code::corrupt,
                        fmt::format("{} tensors, but the offsets of {}", json.as_object().size() - 1, offsets.size()));
        }
        file.entries_.reserve(offsets.size());
        for (const Json::Member& member : json.as_object()) {
            if (member.key == "__metadata__") continue;
            const auto offset = offsets.find(member.key);
            if (offset == offsets.end()) {
                throw Error(Code::corrupt, fmt::format("tensor '{}' has no offsets", member.key));
            }
            const auto dtype = dtype_from_safetensors(member.value.at("dtype").as_string());
            if (!dtype) {
                throw Error(Code::corrupt, fmt::format("tensor '{}' has the unknown dtype {}", member.key,
                                                       member.value.at("dtype").as_string()));
            }
            FileEntry entry{member.key,
                            *dtype,
                            {dims_of(offset->second->at("saved_offsets")), dims_of(member.value.at("shape"))},
                            0,
                            0};
            const Json::Array& range = member.value.at("data_offsets").as_array();
            if (range.size() != 2) throw Error(Code::corrupt, fmt::format("tensor '{}' has no range", member.key));
            entry.begin = range[0].as_int();
            entry.end = range[1].as_int();
            try {
                check_shape(entry.box.sizes, entry.dtype, "it");
            } catch (const Error& error) {
                throw Error(Code::corrupt, fmt::format("tensor '{}': {}", member.key, error.what()));
            }
            const auto itemsize = static_cast<int64_t>(size_of(entry.dtype));
            if (entry.box.offsets.ndim() != entry.box.sizes.ndim() || entry.begin < 0 || entry.end < entry.begin ||
                entry.end > file.data_bytes() || entry.end - entry.begin != entry.box.numel() * itemsize ||
                entry.begin % itemsize != 0) {
                throw Error(Code::corrupt,
                            fmt::format("tensor '{}' of shape {} at bytes {} to {} of {} makes no sense", member.key,
                                        entry.box.sizes.str(), entry.begin, entry.end, file.data_bytes()));
            }
            file.entries_.push_back(std::move(entry));
        }
    } catch (const Error& error) {
        if (error.code() != Code::corrupt) throw;
        corrupt(path, error.what());
    }
    std::sort(file.entries_.begin(), file.entries_.end(), [](const FileEntry& a, const FileEntry& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    file.by_name_.reserve(file.entries_.size());
    int64_t end = 0;
    for (size_t i = 0; i < file.entries_.size(); ++i) {
        const FileEntry& entry = file.entries_[i];
        if (entry.begin != end) {
            corrupt(path,
                    fmt::format("tensor '{}' begins at byte {} of the data, not at {}", entry.name, entry.begin, end));
        }
        end = entry.end;
        file.by_name_.emplace(entry.name, i);
    }
    if (end != file.data_bytes()) {
        corrupt(path, fmt::format("its tensors end at byte {} of {} bytes of data", end, file.data_bytes()));
    }
    return file;
}

const FileEntry* RankFile::find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &entries_[found->second];
}

const FileEntry* RankFile::at(int64_t offset) const {
    const auto after = std::upper_bound(entries_.begin(), entries_.end(), offset,
                                        [](int64_t value, const FileEntry& entry) { return value < entry.begin; });
    if (after == entries_.begin()) return nullptr;
    const FileEntry& entry = *(after - 1);
    return offset < entry.end ? &entry : nullptr;
}

}  // namespace tsr
