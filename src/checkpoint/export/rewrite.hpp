// Writes the contents of another checkpoint as a new save into a root, in one process and in bounded memory: with other
// names, or combined into the file of one rank. The save is committed like every other: files fsynced, manifest last.
#pragma once

#include <functional>
#include <string>

#include "checkpoint/export/streamed_file.hpp"
#include "checkpoint/load/checkpoint.hpp"

namespace tsr {

struct RewriteOptions {
    enum class Files {
        kept,      // the same files, layouts and world size; native checkpoints only
        together,  // one file of one rank
    };
    Files files = Files::kept;
    // New names of tensors and values; without a function names are kept.
    std::function<std::string(const std::string&)> rename_tensor;
    std::function<std::string(const std::string&)> rename_value;
    ByteProgress progress;
};

// Returns the new save's path. INVALID_ARGUMENT if two names become one; INVALID_STATE if a live job saves into `root`.
// A failure leaves nothing behind.
std::string rewrite_checkpoint(const Checkpoint& source, const std::string& root, const RewriteOptions& options,
                               FileSystem& files = posix_file_system());

}  // namespace tsr
