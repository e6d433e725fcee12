// A committed checkpoint, opened for reading with or without ranks: a native checkpoint, a PyTorch DCP directory, a
// torch.save file, safetensors in Hugging Face's layout, or what DeepSpeed's engine wrote. Immutable and thread-safe.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/formats/contents.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/load/find.hpp"
#include "checkpoint/load/load_names.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/model/state.hpp"
#include "comm/communicator.hpp"

namespace tsr {

enum class Allow { no, yes };

struct LoadOptions {
    Verify verify = Verify::blocks;
    Allow missing = Allow::no;     // names of the state that the checkpoint lacks
    Allow unexpected = Allow::no;  // names of the checkpoint that the state lacks
    Allow cast = Allow::no;        // floating-point tensors of another dtype
    int threads = 4;
    std::vector<std::string> only;  // patterns of the names of the state to load; empty: all
    std::vector<NameRule> rules;    // names in the state of names in the checkpoint, if they differ
    ProgressFn progress;            // called on the calling thread
    // The ranks that load this checkpoint together; nullptr: only this rank. All ranks get the same error.
    // Data that several ranks of a host need is read once, if it has at least `least_shared_bytes` bytes.
    std::shared_ptr<Communicator> comm;
    int64_t least_shared_bytes = int64_t{8} << 20;
    milliseconds timeout{600000};  // of each wait for a device
};

// How a load deviated from a strict one. Names are those of the state.
struct LoadReport {
    struct Cast {
        std::string name;
        DType from;
        DType to;
    };
    std::vector<std::string> missing;
    std::vector<std::string> unexpected;
    std::vector<Cast> cast;
    std::vector<std::string> left_alone;  // of the state, not matched by `only`
    bool verified = false;  // all data read was verified by checksums; false if not requested or there are none

    // {"missing":[...],"unexpected":[...],"cast":[{"name","from","to"}],"left_alone":[...],"verified":true}
    [[nodiscard]] Json json() const;
};

// Part `box` of the tensor or alias `name`, to be read into contiguous memory of the saved dtype.
struct ReadPart {
    std::string_view name;
    Box box;
    std::byte* memory = nullptr;
    Device device{};  // of the memory
};

class Checkpoint {
   public:
    // No saver removes a save that is held (native manifests only). Holding costs a file descriptor.
    enum class Hold { yes, no };
    // `path` is a save's directory, a root (its newest save), a root's `latest` or `best`, a DCP directory or its
    // `.metadata`, a torch.save file or the directory of a `model.pt`, a safetensors file, or the directory or index of
    // several.
    [[nodiscard]] static std::shared_ptr<const Checkpoint> open(const std::string& path,
                                                                FileSystem& files = posix_file_system(),
                                                                Hold hold = Hold::yes);

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] const Manifest& manifest() const { return manifest_; }
    // Read again on the first call; generated for formats that have no manifest.
    [[nodiscard]] const std::string& manifest_text() const;
    [[nodiscard]] const std::vector<std::string>& names() const { return names_; }  // tensors and aliases, sorted
    // The id of its save; for formats without one, a text that is equal for equal copies.
    [[nodiscard]] std::string identity() const;

    // One whole tensor into contiguous memory of its dtype and shape, on the CPU or, after what its default stream has,
    // on a device.
    void read(std::string_view name, const Tensor& into, const LoadOptions& options = {}) const;
    // Many parts at once: bytes of a file that several of them need are read once.
    void read(std::span<const ReadPart> parts, const LoadOptions& options = {}) const;
    // Throws MISMATCH, listing every difference, before anything is overwritten. Collective if the options have a
    // communicator.
    LoadReport load(State& state, const LoadOptions& options = {}) const;
    // What load() will read and set; nothing is touched yet. Refers to checkpoint and state.
    struct LoadPlan {
        LoadReport report;
        Values values;
        std::set<std::string> sources_left_alone;  // by their prefixes
        std::vector<Wanted> wanted;
        // For each shared copy, a checksum of the names that all its ranks together load.
        std::map<SharedCopy*, uint32_t> of_copies;
    };
    [[nodiscard]] LoadPlan plan_load(const State& state, const LoadOptions& options = {}) const;

    using Depth = tsr::Depth;
    // One message per fault; empty means sound. Throws only errors that stop the check itself. `progress` is called
    // with the number of data bytes checked, on the checking threads; `poll` is called on the calling thread.
    [[nodiscard]] std::vector<std::string> verify(Depth depth, const ByteProgress& progress = {},
                                                  const std::function<void()>& poll = {}) const {
        return contents_->verify(depth, progress, poll);
    }
    // Whether verify() can detect damage within the data; valid once it has returned.
    [[nodiscard]] bool has_checksums() const { return contents_->has_checksums(); }
    // Throws CORRUPT with the first fault; the other faults are its causes. `progress` is called on the calling thread.
    void check(Depth depth, const ProgressFn& progress = {}) const;

   private:
    Checkpoint(std::string path, std::string text, Manifest manifest);
    [[nodiscard]] static std::shared_ptr<const Checkpoint> open_found(const Found& found, FileSystem& files, Hold hold);
    [[nodiscard]] static std::shared_ptr<Checkpoint> of_foreign(std::string path, Manifest manifest,
                                                                std::unique_ptr<const Contents> contents);
    LoadReport load_with(HostReads* host, State& state, const LoadOptions& options) const;
    [[noreturn]] void throw_unreadable(std::string_view name) const;

    std::string path_;
    mutable std::once_flag text_made_;
    mutable std::string text_;    // guarded by text_made_ once the checkpoint is open
    std::unique_ptr<File> held_;  // the manifest, with the readers' lock
    Manifest manifest_;
    std::vector<std::string> names_;
    std::unique_ptr<const Contents> contents_;
};

}  // namespace tsr
