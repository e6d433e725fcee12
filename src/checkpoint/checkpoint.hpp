// A committed checkpoint, opened for reading from any number of ranks or none. Immutable; every method may be called
// from many threads. Rank files' headers are read when first needed.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/file_system.hpp"
#include "checkpoint/native/manifest.hpp"
#include "checkpoint/native/rank_file.hpp"
#include "checkpoint/native/reader.hpp"
#include "checkpoint/state.hpp"

namespace tsr {

enum class Allow { no, yes };

struct LoadOptions {
    Verify verify = Verify::blocks;
    Allow missing = Allow::no;     // names of the state that the checkpoint lacks
    Allow unexpected = Allow::no;  // names of the checkpoint that the state lacks
    Allow cast = Allow::no;        // floating-point tensors of another dtype
    int threads = 4;
    ProgressFn progress;  // told on the calling thread
};

// What a load did besides what was asked strictly.
struct LoadReport {
    std::vector<std::string> missing;
    std::vector<std::string> unexpected;
    std::vector<std::string> cast;
};

class Checkpoint {
   public:
    // `path` is a save's directory, a root (its newest save), a root's `latest` or its `best`. While it is held no saver
    // removes it; that costs a descriptor.
    enum class Hold { yes, no };
    [[nodiscard]] static std::shared_ptr<const Checkpoint> open(const std::string& path,
                                                                FileSystem& files = posix_file_system(),
                                                                Hold hold = Hold::yes);

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] const Manifest& manifest() const { return manifest_; }
    [[nodiscard]] const std::string& manifest_text() const { return text_; }
    [[nodiscard]] const std::vector<std::string>& names() const { return names_; }  // tensors and aliases, sorted

    // One whole tensor into contiguous CPU memory of its dtype and shape.
    void read(std::string_view name, const Tensor& into, const LoadOptions& options = {}) const;
    // MISMATCH lists every difference, before anything is overwritten.
    LoadReport load(State& state, const LoadOptions& options = {}) const;

    enum class Depth { headers, everything };
    // A message for every fault found; none means sound. Throws only what stops the check itself. `progress` is told
    // the bytes of data that were checked, on the threads that check them.
    [[nodiscard]] std::vector<std::string> verify(Depth depth,
                                                  const std::function<void(int64_t bytes)>& progress = {},
                                                  const std::function<void()>& poll = {}) const;
    // Throws CORRUPT: the first fault, the others as its causes. `progress` is told on the calling thread.
    void check(Depth depth, const ProgressFn& progress = {}) const;

   private:
    Checkpoint(FileSystem& files, std::string path, std::string text, std::unique_ptr<File> held);

    [[nodiscard]] const RankFile& file(int index) const;
    void add_transfers(const std::string& saved_name, const SavedTensor& saved, const Box& wanted, DType dtype,
                       std::byte* memory, std::vector<Transfer>& out) const;
    void compare_headers(std::vector<std::string>& faults) const;

    FileSystem& files_;
    std::string path_;
    std::string text_;
    std::unique_ptr<File> held_;  // the manifest, with the readers' lock
    Manifest manifest_;
    std::vector<std::string> names_;
    mutable std::mutex mutex_;
    mutable std::vector<std::unique_ptr<const RankFile>> rank_files_;  // guarded by mutex_; filled on demand
};

}  // namespace tsr
