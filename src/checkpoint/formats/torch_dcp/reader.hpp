// Opens what PyTorch wrote: its parts as a manifest that the rest of checkpoint/ understands, and the bytes behind it.
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

// A directory with a `.metadata`. Values (BYTE_IO items) are read at once; what is no plain data is told in
// Manifest::unreadable and its pickle is never executed.
[[nodiscard]] TorchCheckpoint open_torch_dcp(FileSystem& files, const std::string& directory);
// The same of a save of ours, whose manifest was read: it tells all but the tensors.
[[nodiscard]] TorchCheckpoint open_torch_dcp(FileSystem& files, const std::string& directory, Manifest manifest);

// A file of torch.save. Dicts become dotted names, as PyTorch's DCP makes them: every dict is descended, a list or tuple if
// it holds a tensor or a dict, then its elements are named by their numbers; all else are values. What lies within the
// object and has a part that can have no name of its own (it is no name, or another's) is one value.
[[nodiscard]] TorchCheckpoint open_torch_save(FileSystem& files, const std::string& path);

}  // namespace tsr
