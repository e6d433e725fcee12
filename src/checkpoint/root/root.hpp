// A root directory: which saves it holds, which is the newest, what may be removed. The truth is the scan for
// manifests; `latest` is a hint for people and scripts. Only directories whose names this library makes are ever
// touched, and in them only files whose names it makes.
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
    std::string directory;        // its name in the root
    bool committed = false;       // it has a manifest
    bool readable = false;        // the manifest begins as it should; then the numbers below are known
    std::optional<Error> unread;  // why nobody could look; what it says may be sound all the same
    int64_t sequence = 0;
    int64_t step = 0;
};

// "step-00000042-5f3a91c2"
[[nodiscard]] std::string step_directory_name(int64_t step, std::string_view save_id);
[[nodiscard]] bool is_step_directory_name(std::string_view name);

// As many bytes as a file has, `most` at most.
[[nodiscard]] std::string first_bytes(FileSystem& files, const std::string& path, int64_t most = 256);
[[nodiscard]] std::string first_bytes(File& file, const std::string& path, int64_t most = 256);

// All saves, committed or not; committed and readable ones last, in the order of their commits.
[[nodiscard]] std::vector<SavedStep> scan_root(FileSystem& files, const std::string& root);
// The directory name of the newest committed save. CORRUPT if it may be one whose manifest cannot be read: to go back
// behind it is the caller's decision.
[[nodiscard]] std::optional<std::string> newest_save(FileSystem& files, const std::string& root);

// One more than that of any save in the root. CORRUPT if none can come after it; an error of the file system, if a
// manifest cannot be looked at.
[[nodiscard]] int64_t next_sequence(FileSystem& files, const std::string& root);
// The time as a manifest tells it: "2026-11-21T09:02:11.123Z".
[[nodiscard]] std::string utc_now();
[[nodiscard]] std::string utc_text(int64_t ns);  // since 1970

// Removes of the save in the directory `path`, which is held: the manifest first, so that it is never half there; then the
// files this library made. What it does not know stays.
void empty_save(FileSystem& files, const std::string& path);
// Then the directory, by its root that is held; it stays if something is left in it.
void remove_emptied(FileSystem& files, const std::string& path);

}  // namespace tsr
