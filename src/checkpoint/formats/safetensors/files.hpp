// Which safetensors files make one checkpoint, as Hugging Face and PyTorch lay them out: one file, a directory with
// `model.safetensors`, one with an index that says which file holds which tensor, or one of several files without an index
// (of different tensors, or of parts of them that say where they belong).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

inline constexpr std::string_view safetensors_ending = ".safetensors";
inline constexpr std::string_view safetensors_index_ending = ".safetensors.index.json";
inline constexpr std::string_view safetensors_file_name = "model.safetensors";
inline constexpr std::string_view safetensors_index_name = "model.safetensors.index.json";

// What `*.safetensors.index.json` holds.
struct SafetensorsIndex {
    std::map<std::string, std::string, std::less<>> weight_map;  // tensor -> file

    // CORRUPT if it is none, or names a file that does not lie beside it.
    [[nodiscard]] static SafetensorsIndex parse(std::string_view text, const std::string& path);
    [[nodiscard]] std::vector<std::string> files() const;  // sorted
};

struct SafetensorsFiles {
    std::string directory;
    std::vector<std::string> names;
    std::string index_name;  // empty: none
    std::optional<SafetensorsIndex> index;
};

// Whether the names of a directory's files tell that it is such a checkpoint.
[[nodiscard]] bool has_safetensors(const std::vector<std::string>& names);
// Whether a file that begins so is a safetensors file.
[[nodiscard]] bool looks_like_safetensors(std::string_view first_bytes);

// `path` is a directory, an index or a safetensors file. INVALID_ARGUMENT if it holds more than one model.
[[nodiscard]] SafetensorsFiles find_safetensors(FileSystem& files, const std::string& path);

// The rank that wrote "shard-00003-model-00001-of-00001.safetensors", as PyTorch names them from 1 on; -1: another name.
[[nodiscard]] int rank_of_shard_name(std::string_view name);

}  // namespace tsr
