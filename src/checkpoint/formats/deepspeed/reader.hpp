// Opens DeepSpeed's checkpoints (files.hpp): their parts as a manifest that the rest of checkpoint/ understands, and
// their bytes. Parameters are the fp32 masters where the optimizer has them, in full; the 16-bit copies are not listed.
// docs/FORMAT.md has the names. Nothing of a pickle is imported or executed.
#pragma once

#include <string>

#include "checkpoint/formats/torch_dcp/reader.hpp"

namespace tsr {

// `directory` is that of a tag. All ranks' files must be there. CORRUPT, NOT_FOUND or UNSUPPORTED name file and reason.
[[nodiscard]] TorchCheckpoint open_deepspeed(FileSystem& files, const std::string& directory);

}  // namespace tsr
