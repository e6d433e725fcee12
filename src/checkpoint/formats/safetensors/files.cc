#include "checkpoint/formats/safetensors/files.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <iterator>

#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/model/state.hpp"
#include "tensor/layout.hpp"

namespace tsr {

namespace {

constexpr int64_t max_index_bytes = 100'000'000;
constexpr int max_depth = 16;  // metadata may have any content

bool is_index_name(std::string_view name) { return name.ends_with(safetensors_index_ending); }

// A file name within the index's directory, which cannot lead out of it.
bool is_plain_name(std::string_view name) {
    return name.size() <= 255 && name.size() > safetensors_ending.size() && name.ends_with(safetensors_ending) &&
           name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

// For a message, which would end at a NUL.
std::string shown(std::string_view name) {
    std::string text(name.substr(0, 300));
    std::replace_if(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, '?');
    return text;
}

SafetensorsFiles of_index(FileSystem& files, const std::string& directory, const std::string& name) {
    const std::string path = join(directory, name);
    SafetensorsFiles found{directory, {}, name, SafetensorsIndex::parse(read_text(files, path, max_index_bytes), path)};
    found.names = found.index->files();
    return found;
}

SafetensorsFiles of_directory(FileSystem& files, const std::string& directory) {
    std::vector<std::string> names;
    if (const int64_t result = files.list(directory, names); result < 0) {
        throw os_error(fmt::format("cannot list {}", directory), static_cast<int>(-result));
    }
    const auto has = [&](std::string_view name) { return std::find(names.begin(), names.end(), name) != names.end(); };
    std::vector<std::string> indices;
    std::copy_if(names.begin(), names.end(), std::back_inserter(indices), is_index_name);
    if (has(safetensors_index_name)) indices = {std::string(safetensors_index_name)};
    if (indices.size() > 1) {
        throw Error(Code::invalid_argument, fmt::format("{} holds several models, with the indices {} and {}; pass one "
                                                        "of them",
                                                        directory, indices[0], indices[1]));
    }
    if (!indices.empty()) {
        SafetensorsFiles found = of_index(files, directory, indices.front());
        const bool lists_single =
            std::find(found.names.begin(), found.names.end(), safetensors_file_name) != found.names.end();
        if (has(safetensors_file_name) && !lists_single) {
            throw Error(Code::invalid_argument,
                        fmt::format("{} holds both {} and {}, which does not list it; pass one of them", directory,
                                    safetensors_file_name, indices.front()));
        }
        return found;
    }
    SafetensorsFiles found{directory, {}, "", std::nullopt};
    std::copy_if(names.begin(), names.end(), std::back_inserter(found.names),
                 [](const std::string& name) { return name.ends_with(safetensors_ending); });
    return found;
}

}  // namespace

SafetensorsIndex SafetensorsIndex::parse(std::string_view text, const std::string& path) {
    SafetensorsIndex index;
    const Json json = Json::parse(text, path, max_depth);
    try {
        for (const Json::Member& member : json.at("weight_map").as_object()) {
            const std::string& file = member.value.as_string();
            if (!is_plain_name(file)) {
                throw Error(Code::corrupt, fmt::format("tensor '{}' is in '{}', which is not the name of a safetensors "
                                                       "file beside the index",
                                                       shown(member.key), shown(file)));
            }
            try {
                check_name(member.key, "a tensor's name");
            } catch (const Error& error) {
                throw Error(Code::corrupt, error.what());
            }
            index.weight_map.emplace(member.key, file);
        }
    } catch (const Error& error) {
        throw Error(error.code(), fmt::format("{}: {}", path, error.what()));
    }
    return index;
}

std::vector<std::string> SafetensorsIndex::files() const {
    std::vector<std::string> names;
    names.reserve(weight_map.size());
    for (const auto& [tensor, file] : weight_map) names.push_back(file);
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
}

bool has_safetensors(const std::vector<std::string>& names) {
    return std::any_of(names.begin(), names.end(), [](const std::string& name) {
        return name.ends_with(safetensors_ending) || is_index_name(name);
    });
}

bool looks_like_safetensors(std::string_view first_bytes) {
    // A header of less than 100 MB leaves the upper half of its length word zero.
    return first_bytes.size() > 8 && first_bytes.substr(4, 5) == std::string_view("\0\0\0\0{", 5);
}

SafetensorsFiles find_safetensors(FileSystem& files, const std::string& path) {
    FileStatus status;
    if (const int64_t result = files.status(path, status); result < 0) {
        throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-result));
    }
    if (status.kind == FileStatus::Kind::directory) return of_directory(files, path);
    const std::string name(name_in_path(path));
    if (is_index_name(name)) return of_index(files, parent_of(path), name);
    return {parent_of(path), {name}, "", std::nullopt};
}

int rank_of_shard_name(std::string_view name) {
    constexpr std::string_view begin = "shard-";
    if (!name.starts_with(begin) || !name.ends_with(safetensors_ending)) return -1;
    int number = 0;
    const auto [end, error] = std::from_chars(name.data() + begin.size(), name.data() + name.size(), number);
    return error == std::errc{} && *end == '-' && number >= 1 && number <= max_layout_ranks ? number - 1 : -1;
}

}  // namespace tsr
