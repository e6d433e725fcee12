// How a model is cut into units and trained: what tsr_fsdp_unit and tsr_fsdp_options say, and what of it goes together. The
// same on all ranks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/request.hpp"
#include "parallel/params.hpp"

namespace tsr {

struct FsdpUnit {
    std::string name;
    std::vector<NamedTensor> params;  // data null: nothing to begin with, the shard is zero
    std::vector<bool> trained;        // of each; empty: all
    int reshard_after_forward =
        1;              // 0: whole from forward to backward; n: kept among each n ranks that follow each other
    int row_block = 0;  // parameters are cut between blocks of so many rows; 0: between rows
    bool flat = false;  // parameters of one dtype are cut as one row of elements, anywhere
    std::optional<DType> param_dtype;   // none: as the options say
    std::optional<DType> reduce_dtype;  // none: as the options say
};

struct FsdpOptions {
    int shard_ranks = 0;  // parameters are cut among so many ranks that follow each other, and each such group has a
                          // replica; 0: among all
    int forward_prefetch = 1;           // units
    int backward_prefetch = 1;          // units
    int grads_in_flight = 2;            // units whose gradients have memory at once, but for those that accumulate
    std::optional<DType> param_dtype;   // of whole parameters; none: as their shards
    std::optional<DType> reduce_dtype;  // of whole gradients; none: as whole parameters
    ReduceOp op = ReduceOp::avg;
    double pre_divide = 1;
    bool sync_values = true;  // shards of rank 0's values; else of each rank's own
};

// Throws INVALID_ARGUMENT for a model, or options of it, that cannot be.
void check_model(const std::vector<FsdpUnit>& units, const FsdpOptions& options, int world_size);

// A line each for check_same_on_all_ranks (comm/fingerprint.hpp), of the options, the units and their parameters.
[[nodiscard]] std::vector<std::string> description(const std::vector<FsdpUnit>& units, const FsdpOptions& options);

}  // namespace tsr
