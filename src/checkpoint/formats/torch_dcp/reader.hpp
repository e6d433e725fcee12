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

// A directory with a `.metadata`. Values (BYTE_IO items) are read immediately; those that are not plain data are listed
// in Manifest::unreadable. No pickle is ever executed.
[[nodiscard]] TorchCheckpoint open_torch_dcp(FileSystem& files, const std::string& directory);
// The same for a save by Tessera whose manifest was read: it has everything but the tensors.
[[nodiscard]] TorchCheckpoint open_torch_dcp(FileSystem& files, const std::string& directory, Manifest manifest);

// A torch.save file. Dicts become dotted names, as in PyTorch's DCP: dicts are always descended into; lists and tuples
// only if they contain a tensor or a dict, and their elements are named by index; everything else is a value. A
// container with a part that cannot have its own name (it is invalid or taken) becomes one value.
[[nodiscard]] TorchCheckpoint open_torch_save(FileSystem& files, const std::string& path);

}  // namespace tsr
