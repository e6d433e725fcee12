// Opens safetensors files in the layouts of Hugging Face and PyTorch: their tensors as a manifest that the rest of
// checkpoint/ understands, and their bytes.
#pragma once

#include <memory>
#include <string>

#include "checkpoint/formats/contents.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

struct SafetensorsCheckpoint {
    Manifest manifest;
    std::unique_ptr<const Contents> contents;
};

// `path` is as for find_safetensors(). Tensors that are in several files as parts are combined; tensors that cannot be
// read are in the manifest's `unreadable`. INVALID_ARGUMENT names both files if two hold the same tensor.
[[nodiscard]] SafetensorsCheckpoint open_safetensors(FileSystem& files, const std::string& path);

}  // namespace tsr
