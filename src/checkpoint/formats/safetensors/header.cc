#include "checkpoint/formats/safetensors/header.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/model/state.hpp"

namespace tsr {

namespace {

constexpr size_t length_word = 8;
constexpr int max_header_depth = 4;
constexpr std::string_view sharding_key = "DCP_SHARDING_INFO";

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::corrupt, why); }

uint64_t length_of(std::string_view word) {
    uint64_t length = 0;
    for (size_t i = 0; i < length_word; ++i) length |= uint64_t{static_cast<unsigned char>(word[i])} << (8 * i);
    return length;
}

std::vector<int64_t> numbers_of(const Json& json) {
    std::vector<int64_t> numbers;
    for (const Json& number : json.as_array()) {
        if (number.as_int() < 0) refuse(fmt::format("negative number {}", number.as_int()));
        numbers.push_back(number.as_int());
    }
    return numbers;
}

SafetensorsEntry entry_of(const std::string& name, const Json& json, int64_t data_bytes) {
    SafetensorsEntry entry;
    entry.name = name;
    const std::vector<int64_t> range = numbers_of(json.at("data_offsets"));
    if (range.size() != 2 || range[1] < range[0] || range[1] > data_bytes) {
        refuse(fmt::format("its byte range is not within the {} bytes of data", data_bytes));
    }
    entry.begin = range[0];
    entry.end = range[1];
    const std::vector<int64_t> sizes = numbers_of(json.at("shape"));
    const std::string& dtype = json.at("dtype").as_string();
    const auto known = dtype_from_safetensors(dtype);
    if (!known || !is_in_safetensors(*known)) {
        entry.unreadable = fmt::format("dtype {} is not supported", dtype.substr(0, 32));
        return entry;
    }
    if (sizes.size() > static_cast<size_t>(max_ndim)) {
        entry.unreadable = fmt::format("it has {} dimensions; at most {} are supported", sizes.size(), max_ndim);
        return entry;
    }
    entry.dtype = *known;
    entry.shape = Dims(sizes);
    try {
        check_shape(entry.shape, entry.dtype, "it");
    } catch (const Error& error) {
        refuse(error.what());
    }
    const int64_t bytes = entry.shape.product() * static_cast<int64_t>(size_of(entry.dtype));
    if (entry.end - entry.begin != bytes) {
        refuse(fmt::format("{} {} has {} bytes, but its byte range is {} to {}", name_of(entry.dtype),
                           entry.shape.str(), bytes, entry.begin, entry.end));
    }
    return entry;
}

// Sets where each part begins in its whole tensor.
void add_offsets(std::vector<SafetensorsEntry>& entries, const std::string& sharding) {
    const Json json = Json::parse(sharding, sharding_key, max_header_depth);
    std::unordered_map<std::string_view, const Json*> offsets;
    offsets.reserve(json.as_object().size());
    for (const Json::Member& member : json.as_object()) offsets.emplace(member.key, &member.value);
    for (SafetensorsEntry& entry : entries) {
        const auto found = offsets.find(entry.name);
        if (found == offsets.end() || !entry.unreadable.empty()) continue;
        const std::vector<int64_t> begin = numbers_of(found->second->at("saved_offsets"));
        if (begin.size() != static_cast<size_t>(entry.shape.ndim())) {
            refuse(fmt::format("tensor '{}' {} has {} saved offsets", entry.name, entry.shape.str(), begin.size()));
        }
        entry.offsets = Dims(begin);
        for (int d = 0; d < entry.shape.ndim(); ++d) {
            int64_t end = 0;
            if (__builtin_add_overflow((*entry.offsets)[d], entry.shape[d], &end)) {
                refuse(fmt::format("tensor '{}' ends beyond 2^63", entry.name));
            }
        }
    }
}

}  // namespace

void check_safetensors_key(std::string_view name) {
    if (name != safetensors_metadata_key) return;
    throw Error(Code::invalid_argument,
                fmt::format("a tensor is named '{}', which safetensors files reserve; rename it, or use the format "
                            "torch_dcp",
                            name));
}

Box SafetensorsEntry::box() const {
    Box box = Box::whole(shape);
    if (offsets) box.offsets = *offsets;
    return box;
}

SafetensorsHeader SafetensorsHeader::read(FileSystem& files, const std::string& path) {
    FileStatus status;
    if (const int64_t result = files.status(path, status); result < 0) {
        if (result == -ENOENT) throw Error(Code::not_found, fmt::format("file {} does not exist", path));
        throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-result));
    }
    if (status.kind != FileStatus::Kind::file) {
        throw Error(Code::corrupt, fmt::format("{} is not a regular file", path));
    }
    return read(*open_file(files, path, OpenMode::read), path);
}

SafetensorsHeader SafetensorsHeader::read(File& file, const std::string& path) {
    const int64_t size = file.size();
    if (size < 0) throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-size));
    if (size < static_cast<int64_t>(length_word)) {
        throw Error(Code::corrupt, fmt::format("{}: it has {} bytes, too few for a safetensors file", path, size));
    }
    std::string header(length_word, '\0');
    read_all(file, path, std::as_writable_bytes(std::span(header)), 0);
    const uint64_t length = length_of(header);
    if (length > static_cast<uint64_t>(std::min(max_header_bytes, size - static_cast<int64_t>(length_word)))) {
        refuse_lfs_pointer(file, path);
        throw Error(
            Code::corrupt,
            fmt::format("{}: its header claims {} bytes, but the file has {} and readers accept at most {}: it was "
                        "truncated or is not a safetensors file",
                        path, length, size, max_header_bytes));
    }
    header.resize(length_word + length);
    read_all(file, path, std::as_writable_bytes(std::span(header).subspan(length_word)), length_word);
    return parse(header, path, size);
}

SafetensorsHeader SafetensorsHeader::parse(std::string_view header, const std::string& path, int64_t size) {
    SafetensorsHeader out;
    out.size_ = size;
    out.data_begin_ = static_cast<int64_t>(header.size());
    const int64_t data_bytes = size - out.data_begin_;
    try {
        if (header.size() <= length_word || data_bytes < 0 || length_of(header) != header.size() - length_word ||
            header[length_word] != '{') {
            refuse("its header is not of the stated size or does not begin with '{'");
        }
        const Json json = Json::parse(header.substr(length_word), "the header", max_header_depth);
        out.entries_.reserve(json.as_object().size());
        for (const Json::Member& member : json.as_object()) {
            if (member.key == safetensors_metadata_key) {
                if (member.value.is(Json::Kind::null)) continue;
                for (const Json::Member& text : member.value.as_object()) {
                    out.metadata_.emplace(text.key, text.value.as_string());
                }
                continue;
            }
            try {
                check_name(member.key, "a tensor's name");
            } catch (const Error& error) {
                throw Error(Code::unsupported, fmt::format("{}: {}", path, error.what()));
            }
            try {
                out.entries_.push_back(entry_of(member.key, member.value, data_bytes));
            } catch (const Error& error) {
                refuse(fmt::format("tensor '{}': {}", member.key, error.what()));
            }
        }
        if (const auto sharding = out.metadata_.find(std::string(sharding_key)); sharding != out.metadata_.end()) {
            add_offsets(out.entries_, sharding->second);
        }
        std::sort(out.entries_.begin(), out.entries_.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
            return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
        });
        out.by_name_.reserve(out.entries_.size());
        int64_t end = 0;
        for (size_t i = 0; i < out.entries_.size(); ++i) {
            const SafetensorsEntry& entry = out.entries_[i];
            if (entry.begin != end) {
                refuse(fmt::format("tensor '{}' begins at byte {} of the data, expected {}", entry.name, entry.begin,
                                   end));
            }
            end = entry.end;
            out.by_name_.emplace(entry.name, i);
        }
        if (end != data_bytes) {
            refuse(fmt::format("its tensors end at byte {} of {} bytes of data: it was truncated or extended", end,
                               data_bytes));
        }
    } catch (const Error& error) {
        if (error.code() != Code::corrupt) throw;
        throw Error(Code::corrupt, fmt::format("{}: {}", path, error.what()));
    }
    return out;
}

const SafetensorsEntry* SafetensorsHeader::find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &entries_[found->second];
}

std::map<std::string, std::string> SafetensorsHeader::tied() const {
    std::map<std::string, std::string> tied;
    for (const auto& [name, target] : metadata_) {
        if (name == "format" || find(name) != nullptr) continue;
        const SafetensorsEntry* entry = find(target);
        if (entry == nullptr || !entry->unreadable.empty()) continue;
        try {
            check_name(name, "a name");
        } catch (const Error&) {
            continue;  // some other note
        }
        tied.emplace(name, target);
    }
    return tied;
}

}  // namespace tsr
