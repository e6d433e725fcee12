// The interface of a save format: lay out this rank's files of one save, write them, and, on rank 0, fill in the
// manifest's part about all ranks' files. Agreement, staging, votes and the commit are the saver's, for all formats.
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

// torch_dcp: unmodified PyTorch reads the save's directory with torch.distributed.checkpoint.
enum class SaveFormat { native, torch_dcp };

// The content of one save. All of it must outlive the writer.
struct SaveContent {
    const SavePlan& plan;
    const Aliases& aliases;
    const Values& values;  // on rank 0: its own and every rank's private ones; elsewhere empty
    const std::string& save_id;
    const std::string& directory;  // the save's path
    int rank = 0;
    CopyStreams* copies = nullptr;  // for pieces on devices
};

// Writes one save. The methods are called in this order, by one thread at a time.
class SaveWriter {
   public:
    virtual ~SaveWriter() = default;
    // The data of each of this rank's files: runs in the memory of the tensors and, for the bytes in between, of the
    // writer.
    [[nodiscard]] virtual std::vector<ByteRuns> lay_out(const State& state) = 0;
    // Computes the checksums that precede the data in file `index`, from the tensors, as write() sees its data only
    // once. `in_order`: the file system writes from the first byte to the last.
    virtual void compute_checksums(size_t index, const ByteRuns& data, bool in_order, int threads) = 0;
    // Writes file `index` with `data`, its data or a copy of it. The file is fsynced, the directory is not.
    virtual void write(FileSystem& files, size_t index, const ChunkSource& data, const WriteOptions& options) = 0;
    // A report for rank 0 about the files written.
    [[nodiscard]] virtual std::string report() const = 0;
    // On rank 0, when the files of all ranks are durable: writes the format's other files, and sets the format, files,
    // tensors and aliases of the manifest. `reports` are in rank order.
    virtual void finish(FileSystem& files, std::span<const std::string> reports, Manifest& manifest) = 0;
};

[[nodiscard]] std::unique_ptr<SaveWriter> native_save_writer(const SaveContent& content);
[[nodiscard]] std::unique_ptr<SaveWriter> torch_dcp_save_writer(const SaveContent& content);

}  // namespace tsr
