// Writes the tensors of a checkpoint in another format, as a new directory that appears when all of it is durable: as
// Hugging Face has them (model.safetensors, or numbered files of about one size and an index of which file holds what), as
// PyTorch's Distributed Checkpoint, or as one file of torch.save or of NumPy's npz. By any number of ranks, each in bounded memory: batches go
// round among them.
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
    int64_t shard_bytes = 0;  // of safetensors: data of a file, unless one tensor is larger; 0: one file
    std::string under;        // only what has a name that begins so, and without that beginning
    int64_t batch_bytes = default_batch_bytes;  // memory of a rank
    ProgressFn progress;                        // told of this rank's bytes, on the calling thread
};

struct Exported {
    std::vector<std::string> files;  // of safetensors
    int64_t tensor_count = 0;
    int64_t size_bytes = 0;             // of tensors
    std::vector<std::string> left_out;  // values, which safetensors and npz cannot hold; sorted
    std::map<std::string, std::string, std::less<>> unreadable;  // left out too: why it cannot be read
};

// A private communicator of the same ranks with a deadline of its own.
[[nodiscard]] std::shared_ptr<Communicator> split_for_export(Communicator& comm, milliseconds timeout);

// Collective over `peers`, which opened the same checkpoint each; all get the same error. `directory`, on a file system that
// all ranks see, must not exist. Tied names are written once, but in npz, which cannot tell of it. INVALID_ARGUMENT if no tensor is left to write.
[[nodiscard]] Exported export_checkpoint(const Checkpoint& source, Peers& peers, const std::string& directory,
                                         const ExportOptions& options, FileSystem& files = posix_file_system());

}  // namespace tsr
