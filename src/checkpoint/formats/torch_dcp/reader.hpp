// Opens PyTorch's checkpoints: their parts as a manifest that the rest of checkpoint/ understands, and their bytes.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "checkpoint/formats/contents.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

struct TorchCheckpoint {
    Manifest manifest;
    std::unique_ptr<const Contents> contents;
};

// Of a file, which must exist.
[[nodiscard]] FileStatus status_of(FileSystem& files, const std::string& path);
// What is known of a checkpoint from the file that was written last; no format of PyTorch has the step.
[[nodiscard]] Manifest manifest_of(const char* format, const FileStatus& status);

// A directory with a `.metadata`. Values (BYTE_IO items) are read immediately; those that are not plain data are listed
// in Manifest::unreadable. No pickle is ever executed.
[[nodiscard]] TorchCheckpoint open_torch_dcp(FileSystem& files, const std::string& directory);
// The same for a save by Tessera whose manifest was read: it has everything but the tensors.
[[nodiscard]] TorchCheckpoint open_torch_dcp(FileSystem& files, const std::string& directory, Manifest manifest);

// A torch.save file, taken apart into names (flattener.hpp).
[[nodiscard]] TorchCheckpoint open_torch_save(FileSystem& files, const std::string& path);

}  // namespace tsr
