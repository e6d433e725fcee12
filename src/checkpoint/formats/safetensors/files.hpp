// Finds the safetensors files that make one checkpoint in the layouts of Hugging Face and PyTorch: one file; a
// directory with `model.safetensors`; with an index that maps tensors to files; or with several files without an index
// (of different tensors, or of parts of tensors with their offsets).
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

// The contents of `*.safetensors.index.json`.
struct SafetensorsIndex {
    std::map<std::string, std::string, std::less<>> weight_map;  // tensor -> file

    // CORRUPT if it is malformed or names a file outside its directory.
    [[nodiscard]] static SafetensorsIndex parse(std::string_view text, const std::string& path);
    [[nodiscard]] std::vector<std::string> files() const;  // sorted
};

struct SafetensorsFiles {
    std::string directory;
    std::vector<std::string> names;
    std::string index_name;  // empty: none
    std::optional<SafetensorsIndex> index;
};

// Whether a directory with these file names is such a checkpoint.
[[nodiscard]] bool has_safetensors(const std::vector<std::string>& names);
// Whether a file with these first bytes looks like a safetensors file.
[[nodiscard]] bool looks_like_safetensors(std::string_view first_bytes);

// `path` is a directory, an index or a safetensors file. INVALID_ARGUMENT if it holds more than one model.
[[nodiscard]] SafetensorsFiles find_safetensors(FileSystem& files, const std::string& path);

// The rank that wrote "shard-00003-model-00001-of-00001.safetensors" (PyTorch counts from 1); -1 for other names.
[[nodiscard]] int rank_of_shard_name(std::string_view name);

}  // namespace tsr
