// Which rank writes what. Every rank computes the same plan from the same state, so no plan is ever gathered. Sharded
// data is written by its holder, replicated data once: large tensors are split into row blocks over the replicas, small
// ones are packed together, and each pack goes to the replica with the least bytes so far. Readers depend only on the
// outcome, which is in the manifest.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/model/manifest.hpp"
#include "checkpoint/model/piece.hpp"
#include "checkpoint/model/state.hpp"

namespace tsr {

// A 16-byte hash of the names, dtypes, shapes and layouts of a state; equal exactly if these are.
using Digest = std::array<uint8_t, 16>;

// Names that share memory with another: name -> the first of them in order. Whole, non-empty tensors only.
using Aliases = std::map<std::string, std::string, std::less<>>;
[[nodiscard]] Aliases find_aliases(const State& state);

// The digest of the names, dtypes, shapes and layouts of the tensors.
[[nodiscard]] Digest structure_of(const State& state, int world_size);
[[nodiscard]] Digest digest_of(std::string_view text);
// The structure as text, one line per tensor or value in name order, to find a difference. Without private values.
[[nodiscard]] std::string describe(const State& state, const Values& values, int world_size);
// "it has tensor 'x' f32 [3] where rank 0 has ...": the first line in which `mine` differs from rank 0's.
[[nodiscard]] std::string first_difference(std::string_view rank0, std::string_view mine);

struct PlanOptions {
    int64_t split_bytes = int64_t{4} << 20;  // replicated tensors of at least this size are split
    int64_t pack_bytes = int64_t{4} << 20;   // smaller ones are packed up to this size
};

struct SavePlan {
    std::vector<std::vector<Piece>> files;  // the files of this rank, each in file order; names belong to the state

    // Every tensor as in the manifest, but with ranks instead of file numbers; for explicit pieces the rank's file is
    // in `nth_file`. Filled only on rank 0.
    [[nodiscard]] SavedTensors tensors() const { return tensors(alike, irregular); }
    // The same with these arguments instead of `alike` and `irregular`.
    [[nodiscard]] SavedTensors tensors(std::span<const std::shared_ptr<const SavedTensor>> alike_told,
                                       SavedTensors told) const;

    // The parts of tensors(), in a compact form, as a plan is kept.
    struct Regular {
        size_t name_end = 0;  // end of its name in `names`; it begins at the end of the previous one
        size_t tensor = 0;    // in `alike`
    };
    std::string names;
    std::vector<Regular> regular;
    std::vector<std::shared_ptr<const SavedTensor>> alike;
    SavedTensors irregular;
    std::map<std::string, std::vector<int>, std::less<>> nth_file;  // a piece of an explicit tensor -> its rank's k-th
};

// INVALID_ARGUMENT if a layout has another world size or assigns elements to no rank, or a piece belongs to another
// rank.
[[nodiscard]] SavePlan make_plan(const State& state, const Aliases& aliases, int rank, int world_size,
                                 const PlanOptions& options = {});

// The tensors with ranks replaced by indices into `files`, which receives every rank's files in order of (index, rank).
[[nodiscard]] SavedTensors number_files(const SavePlan& plan, const std::vector<std::vector<SavedFile>>& of_ranks,
                                        std::vector<SavedFile>& files);

// Everything that depends on a state's tensors but not on its values.
struct StatePlan {
    std::shared_ptr<const void> version;  // of the tensors
    Digest structure;
    Aliases aliases;
    Digest alias_digest;
    std::shared_ptr<const SavePlan> plan;  // with these aliases
};

// The plan of the last save, reused by the next save of the same tensors. It refers to names and memory of the state,
// so use it only while that exists.
class PlanCache {
   public:
    [[nodiscard]] std::shared_ptr<const StatePlan> of(const State& state, int rank, int world_size,
                                                      const PlanOptions& options);

   private:
    std::shared_ptr<const StatePlan> last_;
};

}  // namespace tsr
