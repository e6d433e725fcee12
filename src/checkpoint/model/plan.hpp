// Which rank writes what, by arithmetic: every rank computes the same answer from the same state, so no plan is ever
// gathered. Sharded data is written by its holder. Of replicas one writes: large tensors are split into row blocks over
// the replicas, small ones are packed together, and packs go to whoever has least so far. That choice is the writer's
// affair; the manifest tells readers the outcome.
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

// Sixteen bytes that are equal exactly when two ranks' states have the same names, dtypes, shapes and layouts.
using Digest = std::array<uint8_t, 16>;

// Names that share memory with another: name -> the first of them in order. Whole, non-empty tensors only.
using Aliases = std::map<std::string, std::string, std::less<>>;
[[nodiscard]] Aliases find_aliases(const State& state);

// Equal where names, dtypes, shapes and layouts of the tensors are.
[[nodiscard]] Digest structure_of(const State& state, int world_size);
[[nodiscard]] Digest digest_of(std::string_view text);
// The structure as text, one line a tensor or value in order of names, to find out what differs. Private values are left
// out.
[[nodiscard]] std::string describe(const State& state, const Values& values, int world_size);
// "it has tensor 'x' f32 [3] where rank 0 has ...": the first line in which `mine` differs from rank 0's.
[[nodiscard]] std::string first_difference(std::string_view rank0, std::string_view mine);

struct PlanOptions {
    int64_t split_bytes = int64_t{4} << 20;  // replicated tensors from here on are split
    int64_t pack_bytes = int64_t{4} << 20;   // small ones are packed up to here
};

struct SavePlan {
    std::vector<std::vector<Piece>> files;  // what this rank writes: its files, each in file order; names are state's

    // Every tensor as the manifest will tell it, but with ranks in place of file numbers, and in explicit pieces the
    // rank's file in `nth_file`. On rank 0 only; the others have none.
    [[nodiscard]] SavedTensors tensors() const { return tensors(alike, irregular); }
    // The same with these in the places of `alike` and `irregular`.
    [[nodiscard]] SavedTensors tensors(std::span<const std::shared_ptr<const SavedTensor>> alike_told,
                                       SavedTensors told) const;

    // What that is made of, small: a plan is kept.
    struct Regular {
        size_t name_end = 0;  // in `names`, where it begins at the end of the one before
        size_t tensor = 0;    // in `alike`
    };
    std::string names;
    std::vector<Regular> regular;
    std::vector<std::shared_ptr<const SavedTensor>> alike;
    SavedTensors irregular;
    std::map<std::string, std::vector<int>, std::less<>> nth_file;  // a piece of an explicit tensor -> its rank's k-th
};

// INVALID_ARGUMENT if a layout is of another world size or leaves elements to no rank, or a piece is of another rank.
[[nodiscard]] SavePlan make_plan(const State& state, const Aliases& aliases, int rank, int world_size,
                                 const PlanOptions& options = {});

// The tensors with ranks turned into numbers of `files`, which get every rank's files in order of (index, rank).
[[nodiscard]] SavedTensors number_files(const SavePlan& plan, const std::vector<std::vector<SavedFile>>& of_ranks,
                                        std::vector<SavedFile>& files);

// All that follows from a state's tensors, whatever its values.
struct StatePlan {
    std::shared_ptr<const void> version;  // of the tensors
    Digest structure;
    Aliases aliases;
    Digest alias_digest;
    std::shared_ptr<const SavePlan> plan;  // with these aliases
};

// The plan of the last save: the next one of the same tensors computes nothing. It refers to names and memory of that
// state, so it is looked at only while that is there.
class PlanCache {
   public:
    [[nodiscard]] std::shared_ptr<const StatePlan> of(const State& state, int rank, int world_size,
                                                      const PlanOptions& options);

   private:
    std::shared_ptr<const StatePlan> last_;
};

}  // namespace tsr
