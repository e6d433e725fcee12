// Writes the tensors of a checkpoint in another format, as a new directory that appears when all of it is durable: in
// Hugging Face's layout (model.safetensors, or numbered files of about equal size and an index of their tensors), as
// PyTorch's Distributed Checkpoint, or as one file of torch.save or NumPy's npz. Any number of ranks take part, each in
// bounded memory: batches are dealt out to them in turn.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "checkpoint/io/progress.hpp"
#include "checkpoint/load/checkpoint.hpp"
#include "checkpoint/model/batches.hpp"
#include "comm/peers.hpp"

namespace tsr {

enum class ExportFormat { safetensors, torch_dcp, torch_save, npz };
[[nodiscard]] std::string_view name_of(ExportFormat format);
[[nodiscard]] std::optional<ExportFormat> export_format(std::string_view name);

struct ExportOptions {
    ExportFormat format = ExportFormat::safetensors;
    int64_t shard_bytes = 0;  // safetensors only: data per file, unless a single tensor is larger; 0: one file
    std::string under;        // export only names with this prefix, and strip it
    int64_t batch_bytes = default_batch_bytes;  // memory per rank
    ProgressFn progress;                        // called with this rank's bytes, on the calling thread
};

struct Exported {
    std::vector<std::string> files;  // names of the files
    int64_t tensor_count = 0;
    int64_t size_bytes = 0;             // of tensors
    std::vector<std::string> left_out;  // values, which safetensors and npz cannot hold; sorted
    std::map<std::string, std::string, std::less<>> unreadable;  // also left out: name -> why it cannot be read
};

// A private communicator of the same ranks with its own timeout.
[[nodiscard]] std::shared_ptr<Communicator> split_for_export(Communicator& comm, milliseconds timeout);

// Collective over `peers`, which have all opened the same checkpoint; all get the same error. `directory` must be on a
// file system that all ranks see and must not exist. Tied tensors are written once, except in npz, which has no ties.
// INVALID_ARGUMENT if there is no tensor to write.
[[nodiscard]] Exported export_checkpoint(const Checkpoint& source, Peers& peers, const std::string& directory,
                                         const ExportOptions& options, FileSystem& files = posix_file_system());

}  // namespace tsr
