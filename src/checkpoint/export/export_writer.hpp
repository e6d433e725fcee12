// The interface of an export format: rank 0 begins and finishes, and in between all ranks write their share of the
// batches into which the tensors are cut.
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
    std::string source;  // name in the checkpoint
    std::string name;
    TypedBox box;
};

// The same on every rank.
struct ExportSelection {
    std::vector<ExportEntry> entries;
    std::map<std::string, std::string> tied;  // new name -> new name that is written
    Values values;
};

struct Share {
    int rank = 0;
    int world_size = 1;
    int64_t batch_bytes = default_batch_bytes;
    ByteProgress progress;  // called with the number of bytes written
};

class ExportWriter {
   public:
    virtual ~ExportWriter() = default;
    virtual void begin() = 0;  // on rank 0
    // Returns a report for rank 0. The data is durable, the names of the files are not.
    [[nodiscard]] virtual std::string write(const Share& share) = 0;
    // On rank 0, with every rank's report. Returns the names of the files.
    [[nodiscard]] virtual std::vector<std::string> finish(std::span<const std::string> reports) = 0;
};

// Calls visit(parts, bytes) for the batches of `boxes` in this share: every world_size-th. `batch` counts all batches,
// across calls.
void for_each_own_batch(std::span<const TypedBox> boxes, const Share& share, int64_t& batch,
                        const std::function<void(std::span<const BatchPart> parts, int64_t bytes)>& visit);

// Reads the parts of a batch, one after the other, into `memory`.
void read_batch(const Checkpoint& source, std::span<const ExportEntry> entries, std::span<const BatchPart> batch,
                std::byte* memory);

// Writers of files in `directory`. They keep a reference to `selection`.
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
