// A root directory: which saves it holds, which is the newest, what may be removed. The scan for manifests decides;
// `latest` is a hint for people and scripts. Only directories with names in this library's form are ever touched, and
// in them only files with names in its form.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/model/file_names.hpp"

namespace tsr {

inline constexpr std::string_view latest_name = "latest";

struct SavedStep {
    std::string directory;        // name in the root
    bool committed = false;       // it has a manifest
    bool readable = false;        // the head of the manifest is valid; then the numbers below are known
    std::optional<Error> unread;  // why the manifest could not be read; it may still be sound
    int64_t sequence = 0;
    int64_t step = 0;
};

// "step-00000042-5f3a91c2"
[[nodiscard]] std::string step_directory_name(int64_t step, std::string_view save_id);
[[nodiscard]] bool is_step_directory_name(std::string_view name);

// The first bytes of a file, at most `most`.
[[nodiscard]] std::string first_bytes(FileSystem& files, const std::string& path, int64_t most = 256);
[[nodiscard]] std::string first_bytes(File& file, const std::string& path, int64_t most = 256);

// All saves, committed or not; committed and readable ones last, in commit order.
[[nodiscard]] std::vector<SavedStep> scan_root(FileSystem& files, const std::string& root);
// The directory name of the newest committed save. CORRUPT if a save with an unreadable manifest may be newer: falling
// back to an older save is the caller's decision.
[[nodiscard]] std::optional<std::string> newest_save(FileSystem& files, const std::string& root);

// One more than the sequence of any save in the root. CORRUPT if there is no higher number; an error of the file system
// if a manifest cannot be read.
[[nodiscard]] int64_t next_sequence(FileSystem& files, const std::string& root);
// The current time in the format of manifests: "2026-11-21T09:02:11.123Z".
[[nodiscard]] std::string utc_now();
[[nodiscard]] std::string utc_text(int64_t ns);  // since 1970

// Removes the files of the save in `path`, a held directory: first the manifest, so that there is never half a
// checkpoint, then the files that this library wrote. Other files stay.
void empty_save(FileSystem& files, const std::string& path);
// Then removes the directory, through its held root; it stays if it is not empty.
void remove_emptied(FileSystem& files, const std::string& path);

}  // namespace tsr
