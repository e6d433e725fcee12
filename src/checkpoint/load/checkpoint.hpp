// A committed checkpoint, opened for reading from any number of ranks or none: a native one, a PyTorch DCP directory, a
// file of torch.save, or safetensors of the Hugging Face kind. Immutable; every method may be called from many threads.
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
#include "checkpoint/load/load_names.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/model/state.hpp"
#include "checkpoint/load/find.hpp"
#include "comm/communicator.hpp"

namespace tsr {

enum class Allow { no, yes };

struct LoadOptions {
    Verify verify = Verify::blocks;
    Allow missing = Allow::no;     // names of the state that the checkpoint lacks
    Allow unexpected = Allow::no;  // names of the checkpoint that the state lacks
    Allow cast = Allow::no;        // floating-point tensors of another dtype
    int threads = 4;
    std::vector<std::string> only;  // patterns of the names of the state that are loaded; none: all
    std::vector<NameRule> rules;    // what names of the checkpoint are in the state, if they differ
    ProgressFn progress;            // told on the calling thread
    // The ranks that load this checkpoint together; nullptr: this one alone. All ranks get the same error.
    // Ranks of one host read what several of them want once, from so many bytes on.
    std::shared_ptr<Communicator> comm;
    int64_t least_shared_bytes = int64_t{8} << 20;
};

// What a load did besides what is asked strictly. Names are those of the state.
struct LoadReport {
    struct Cast {
        std::string name;
        DType from;
        DType to;
    };
    std::vector<std::string> missing;
    std::vector<std::string> unexpected;
    std::vector<Cast> cast;
    std::vector<std::string> left_alone;  // of the state, since `only` is given and has no such names
    bool verified = false;  // by checksums of all that was read, unless it was not asked for or there are none

    // {"missing":[...],"unexpected":[...],"cast":[{"name","from","to"}],"left_alone":[...],"verified":true}
    [[nodiscard]] Json json() const;
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
    // `.metadata`, a file of torch.save or the directory of a `model.pt`, a safetensors file, or the directory or index of
    // several.
    [[nodiscard]] static std::shared_ptr<const Checkpoint> open(const std::string& path,
                                                                FileSystem& files = posix_file_system(),
                                                                Hold hold = Hold::yes);

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] const Manifest& manifest() const { return manifest_; }
    // Read again, or made of formats that have none, when it is first asked for.
    [[nodiscard]] const std::string& manifest_text() const;
    [[nodiscard]] const std::vector<std::string>& names() const { return names_; }  // tensors and aliases, sorted
    // That of its save; of formats that have none the same of equal copies.
    [[nodiscard]] std::string identity() const;

    // One whole tensor into contiguous CPU memory of its dtype and shape.
    void read(std::string_view name, const Tensor& into, const LoadOptions& options = {}) const;
    // Many parts at once: what they share of a file is read once.
    void read(std::span<const ReadPart> parts, const LoadOptions& options = {}) const;
    // MISMATCH lists every difference, before anything is overwritten. Collective if the options have a communicator.
    LoadReport load(State& state, const LoadOptions& options = {}) const;
    // What load() reads and sets, found out first: nothing is touched yet. Refers to checkpoint and state.
    struct LoadPlan {
        LoadReport report;
        Values values;
        std::set<std::string> sources_left_alone;  // by their prefixes
        std::vector<Wanted> wanted;
        // Of what is loaded of each shared copy, by all its ranks together: a checksum of the names.
        std::map<SharedCopy*, uint32_t> of_copies;
    };
    [[nodiscard]] LoadPlan plan_load(const State& state, const LoadOptions& options = {}) const;

    using Depth = tsr::Depth;
    // A message for every fault found; none means sound. Throws only what stops the check itself. `progress` is told
    // the bytes of data that were checked, on the threads that check them; `poll` is called by the calling thread.
    [[nodiscard]] std::vector<std::string> verify(Depth depth, const ByteProgress& progress = {},
                                                  const std::function<void()>& poll = {}) const {
        return contents_->verify(depth, progress, poll);
    }
    // Whether verify(), once it has returned, could see damage within the data.
    [[nodiscard]] bool has_checksums() const { return contents_->has_checksums(); }
    // Throws CORRUPT: the first fault, the others as its causes. `progress` is told on the calling thread.
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
