// Finds the checkpoint that a path means, and its format.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

inline constexpr std::string_view torch_save_file_name = "model.pt";  // of an export, within its directory

enum class Format { native, torch_dcp, torch_save, safetensors, deepspeed };

struct Found {
    Format format = Format::native;
    std::string path;  // the checkpoint's directory; torch_save and safetensors: the file, if one was named
};

// The checkpoint that a path argument means: a save; a root (its newest save); a root's `latest` or `best`; PyTorch's:
// a DCP directory, its `.metadata`, a zip file, or the directory of a `model.pt`; safetensors: a file, an index, or a
// directory of them; DeepSpeed's: the directory of a tag, or the one above it whose `latest` names the tag. The message
// of NOT_FOUND describes what is there instead.
[[nodiscard]] Found resolve_checkpoint(FileSystem& files, const std::string& path);

}  // namespace tsr
