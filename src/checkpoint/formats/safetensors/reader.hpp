// Opens safetensors files as Hugging Face and PyTorch lay them out: their tensors as a manifest that the rest of
// checkpoint/ understands, and the bytes behind it.
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

// `path` is what find_safetensors() takes. Tensors that stand in several files as parts are put together; of what is not
// read the manifest's `unreadable` tells. INVALID_ARGUMENT names both files if two hold the same tensor.
[[nodiscard]] SafetensorsCheckpoint open_safetensors(FileSystem& files, const std::string& path);

}  // namespace tsr
