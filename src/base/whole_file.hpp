// Small files that a reader sees whole or not at all.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

namespace tsr {

// Writes a draft beside `path` and renames it over `path`; a symbolic link in the draft's place is not followed. Not
// fsynced: what has to outlive a power loss goes through checkpoint/io.
void write_whole_file(const std::string& path, std::string_view text, mode_t mode);

}  // namespace tsr
