// What export_checkpoint() asks of a format: rank 0 begins and finishes, and between the two all ranks write their share of
// the batches into which the tensors are cut.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/load/checkpoint.hpp"
#include "checkpoint/model/batches.hpp"

namespace tsr {

struct ExportEntry {
    std::string source;  // its name in the checkpoint
    std::string name;
    TypedBox box;
};

// The same on every rank.
struct ExportSelection {
    std::vector<ExportEntry> entries;
    std::map<std::string, std::string> tied;  // by their new names
    Values values;
};

struct Share {
    int rank = 0;
    int world_size = 1;
    int64_t batch_bytes = default_batch_bytes;
    ByteProgress progress;  // told of bytes that are written
};

class ExportWriter {
   public:
    virtual ~ExportWriter() = default;
    virtual void begin() = 0;  // on rank 0
    // Returns what rank 0 has to know of it. What it wrote is durable but for its name.
    [[nodiscard]] virtual std::string write(const Share& share) = 0;
    // On rank 0, with every rank's report. Returns the names of the files.
    [[nodiscard]] virtual std::vector<std::string> finish(std::span<const std::string> reports) = 0;
};

// Calls visit(parts, bytes) for those batches of `boxes` that fall to the share: each world_size-th. `batch` counts all of
// them, over one list after another.
void for_each_own_batch(std::span<const TypedBox> boxes, const Share& share, int64_t& batch,
                        const std::function<void(std::span<const BatchPart> parts, int64_t bytes)>& visit);

// Reads a batch one part after another into `memory`.
void read_batch(const Checkpoint& source, std::span<const ExportEntry> entries, std::span<const BatchPart> batch,
                std::byte* memory);

// `directory` is where the files go. They keep a reference to `selection`.
[[nodiscard]] std::unique_ptr<ExportWriter> safetensors_export(const Checkpoint& source,
                                                               const ExportSelection& selection,
                                                               const std::string& directory, int64_t shard_bytes,
                                                               FileSystem& files);
[[nodiscard]] std::unique_ptr<ExportWriter> torch_dcp_export(const Checkpoint& source, const ExportSelection& selection,
                                                             const std::string& directory, FileSystem& files);
[[nodiscard]] std::unique_ptr<ExportWriter> torch_save_export(const Checkpoint& source,
                                                              const ExportSelection& selection,
                                                              const std::string& directory, FileSystem& files);
[[nodiscard]] std::unique_ptr<ExportWriter> npz_export(const Checkpoint& source, const ExportSelection& selection,
                                                       const std::string& directory, FileSystem& files);
void check_npz_entry(const std::string& name, DType dtype);  // UNSUPPORTED

}  // namespace tsr
