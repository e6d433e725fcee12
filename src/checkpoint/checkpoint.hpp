// A committed checkpoint, opened for reading from any number of ranks or none: a native one, a PyTorch DCP directory, or a
// file of torch.save. Immutable; every method may be called from many threads.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/contents.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/native/manifest.hpp"
#include "checkpoint/state.hpp"

namespace tsr {

struct TorchCheckpoint;

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

// Part `box` of the tensor or alias `name`, to be read into contiguous CPU memory of the saved dtype.
struct ReadPart {
    std::string_view name;
    Box box;
    std::byte* memory = nullptr;
};

class Checkpoint {
   public:
    // While a save with a manifest is held no saver removes it; that costs a descriptor.
    enum class Hold { yes, no };
    // `path` is a save's directory, a root (its newest save), a root's `latest` or its `best`, a DCP directory or its
    // `.metadata`, or a file of torch.save.
    [[nodiscard]] static std::shared_ptr<const Checkpoint> open(const std::string& path,
                                                                FileSystem& files = posix_file_system(),
                                                                Hold hold = Hold::yes);

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] const Manifest& manifest() const { return manifest_; }
    [[nodiscard]] const std::string& manifest_text() const { return text_; }
    [[nodiscard]] const std::vector<std::string>& names() const { return names_; }  // tensors and aliases, sorted

    // One whole tensor into contiguous CPU memory of its dtype and shape.
    void read(std::string_view name, const Tensor& into, const LoadOptions& options = {}) const;
    // Many parts at once: what they share of a file is read once.
    void read(std::span<const ReadPart> parts, const LoadOptions& options = {}) const;
    // MISMATCH lists every difference, before anything is overwritten.
    LoadReport load(State& state, const LoadOptions& options = {}) const;

    using Depth = tsr::Depth;
    // A message for every fault found; none means sound. Throws only what stops the check itself. `progress` is told
    // the bytes of data that were checked, on the threads that check them; `poll` is called by the calling thread.
    [[nodiscard]] std::vector<std::string> verify(Depth depth, const ByteProgress& progress = {},
                                                  const std::function<void()>& poll = {}) const {
        return contents_->verify(depth, progress, poll);
    }
    // Throws CORRUPT: the first fault, the others as its causes. `progress` is told on the calling thread.
    void check(Depth depth, const ProgressFn& progress = {}) const;

   private:
    Checkpoint(std::string path, std::string text, Manifest manifest);
    [[nodiscard]] static std::shared_ptr<Checkpoint> of_torch(std::string path, std::string text,
                                                              TorchCheckpoint opened);
    [[noreturn]] void throw_unreadable(std::string_view name) const;

    std::string path_;
    std::string text_;
    std::unique_ptr<File> held_;  // the manifest, with the readers' lock
    Manifest manifest_;
    std::vector<std::string> names_;
    std::unique_ptr<const Contents> contents_;
};

}  // namespace tsr
