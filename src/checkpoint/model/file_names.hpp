// The names of the files in a save's directory, for all formats.
#pragma once

#include <string>
#include <string_view>

namespace tsr {

inline constexpr std::string_view manifest_name = "manifest.json";
inline constexpr std::string_view writing_name = ".writing";        // the lease of the save that is being written
inline constexpr std::string_view dcp_metadata_name = ".metadata";  // of PyTorch's Distributed Checkpoint

// "rank-00003.safetensors", and "rank-00003.1.safetensors" for a rank's second file.
[[nodiscard]] std::string rank_file_name(int rank, int index);
[[nodiscard]] bool is_rank_file_name(std::string_view name);
// "__3_0.distcp"
[[nodiscard]] std::string dcp_file_name(int rank);
[[nodiscard]] bool is_dcp_file_name(std::string_view name);
// Whether Tessera writes files with this name into a save's directory.
[[nodiscard]] bool is_save_file_name(std::string_view name);

}  // namespace tsr
