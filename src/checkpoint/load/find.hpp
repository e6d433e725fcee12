// Which checkpoint a path means, and of which format it is.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

inline constexpr std::string_view torch_save_file_name = "model.pt";  // of an export, in its directory

enum class Format { native, torch_dcp, torch_save, safetensors };

struct Found {
    Format format = Format::native;
    std::string path;  // of the checkpoint's directory; torch_save and safetensors: of the file, if one was named
};

// The checkpoint that a path argument means: a save, a root (its newest save), a root's `latest` or `best`, or what PyTorch
// wrote: a DCP directory, its `.metadata`, a zip file, or the directory of a `model.pt`; or safetensors: a file, an index, or
// a directory of them. NOT_FOUND says what is there instead.
[[nodiscard]] Found resolve_checkpoint(FileSystem& files, const std::string& path);

}  // namespace tsr
