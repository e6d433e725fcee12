// What a saver asks of a format: to lay out this rank's files of one save, to write them, and, on rank 0, to fill in what the
// manifest tells of all ranks' files. Agreement, staging, votes and the commit are the saver's, whatever the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/io/file_system.hpp"
#include "checkpoint/io/stream.hpp"
#include "checkpoint/model/byte_runs.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/model/plan.hpp"
#include "checkpoint/model/state.hpp"

namespace tsr {

// torch_dcp: an unmodified PyTorch reads the save's directory by torch.distributed.checkpoint.
enum class SaveFormat { native, torch_dcp };

// What one save holds. All of it outlives the writer.
struct SaveContent {
    const SavePlan& plan;
    const Aliases& aliases;
    const Values& values;  // rank 0's, with every rank's private ones; elsewhere none
    const std::string& save_id;
    const std::string& directory;  // the save's path
    int rank = 0;
};

// Of one save. Its methods are called in this order, by one thread at a time.
class SaveWriter {
   public:
    virtual ~SaveWriter() = default;
    // The data of each of this rank's files, in the tensors' memories and, for what stands between them, in the writer's.
    [[nodiscard]] virtual std::vector<ByteRuns> lay_out(const SaveContent& content, const State& state) = 0;
    // Computes the checksums that stand before the data in file `index`, from the tensors: what write() is given can be seen
    // but once. `in_order`: the file system writes from the first byte to the last.
    virtual void compute_checksums(size_t index, const ByteRuns& data, bool in_order, int threads) = 0;
    // Writes file `index`, whose data, or the copy of it, is `data`. The file is fsynced, the directory is not.
    virtual void write(FileSystem& files, size_t index, const ChunkSource& data, const WriteOptions& options) = 0;
    // What rank 0 has to know of the files that were written.
    [[nodiscard]] virtual std::string report() const = 0;
    // On rank 0, when all ranks' files are durable: writes what the format keeps beside them, and sets the format, the files,
    // the tensors and the aliases of the manifest. `reports` are in order of ranks.
    virtual void finish(FileSystem& files, std::span<const std::string> reports, Manifest& manifest) = 0;
};

[[nodiscard]] std::unique_ptr<SaveWriter> native_save_writer();
[[nodiscard]] std::unique_ptr<SaveWriter> torch_dcp_save_writer();

}  // namespace tsr
