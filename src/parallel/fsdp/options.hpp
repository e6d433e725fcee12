// How a model is split into units and trained (tsr_fsdp_unit and tsr_fsdp_options), and the checks of their
// combinations. The same on all ranks.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/request.hpp"
#include "parallel/params.hpp"

namespace tsr {

struct FsdpUnit {
    std::string name;
    std::vector<NamedTensor> params;    // data null: no initial values, the shard is zero
    std::vector<bool> trained;          // one per parameter; empty: all are trained
    int reshard_after_forward = 1;      // 0: stays unsharded until backward; n: kept by every n consecutive ranks
    int row_block = 0;                  // parameters are split between blocks of this many rows; 0: between any rows
    bool flat = false;                  // parameters of one dtype are sharded as one row of elements, split anywhere
    std::optional<DType> param_dtype;   // none: as the options say
    std::optional<DType> reduce_dtype;  // none: as the options say
};

// What messages name the calls of the interface that the trainer uses.
struct FsdpCalls {
    std::string_view ready = "grads_ready()";
    std::string_view reshard = "reshard()";
    std::string_view or_unused = ", or mark them unused (which counts as zeros),";
};

struct FsdpOptions {
    int shard_ranks = 0;  // parameters are sharded over groups of this many consecutive ranks (replicas); 0: over all
    int forward_prefetch = 1;           // units
    int backward_prefetch = 1;          // units
    int grads_in_flight = 2;            // units with gradient memory at the same time, besides those that accumulate
    std::optional<DType> param_dtype;   // of unsharded parameters; none: as their shards
    std::optional<DType> reduce_dtype;  // of unsharded gradients; none: as unsharded parameters
    ReduceOp op = ReduceOp::avg;
    double pre_divide = 1;
    bool sync_values = true;  // shards begin with rank 0's values; otherwise with each rank's own
    FsdpCalls calls = {};
};

// Throws INVALID_ARGUMENT for an invalid model or invalid options.
void check_model(const std::vector<FsdpUnit>& units, const FsdpOptions& options, int world_size);

// The device of a valid model's parameters. `own`: the communicator's, if it has one. Throws INVALID_ARGUMENT or UNSUPPORTED if
// they are not all in one place, or on another device.
[[nodiscard]] Device device_of(const std::vector<FsdpUnit>& units, const std::optional<Device>& own);
// Throws UNSUPPORTED for options that parameters on a device cannot have, or only with kernels that it lacks.
void check_for_device(const std::vector<FsdpUnit>& units, const FsdpOptions& options, bool has_slices, Device device);

// One line per option, unit and parameter for check_same_on_all_ranks (comm/fingerprint.hpp).
[[nodiscard]] std::vector<std::string> description(const std::vector<FsdpUnit>& units, const FsdpOptions& options);

}  // namespace tsr
