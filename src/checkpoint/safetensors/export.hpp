// Writes the tensors of a checkpoint as Hugging Face has them: model.safetensors, or numbered files of about one size and
// an index of which file holds what. By one process, in bounded memory; the directory appears when all of it is durable.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/streamed_file.hpp"

namespace tsr {

struct ExportOptions {
    int64_t shard_bytes = 0;  // data of a file, unless one tensor is larger; 0: one file
    std::string under;        // only tensors whose name begins so, and without that beginning
    ByteProgress progress;
};

struct Exported {
    std::vector<std::string> files;
    int64_t tensor_count = 0;
    int64_t size_bytes = 0;             // of tensors
    std::vector<std::string> left_out;  // values, which safetensors cannot hold; sorted
};

// `directory` must not exist. Tied names are written once; `__metadata__` names the others, as safetensors' own
// save_model() has it. INVALID_ARGUMENT if no tensor is left to write.
[[nodiscard]] Exported export_safetensors(const Checkpoint& source, const std::string& directory,
                                          const ExportOptions& options, FileSystem& files = posix_file_system());

}  // namespace tsr
