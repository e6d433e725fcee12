// The options of DDP (tsr_ddp_options) and the checks of their combinations. The same on all ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/request.hpp"
#include "parallel/params.hpp"

namespace tsr {

// Numbers are the TSR_DDP_HOOK_ and TSR_DDP_JOIN_ values of tessera/ddp.h.
enum class DdpHook : int32_t { all_reduce = 0, power_sgd = 1, noop = 2 };
enum class DdpJoin : int32_t { off = 0, divide_by_world = 1, divide_by_active = 2 };

struct DdpOptions {
    size_t bucket_bytes = size_t{25} << 20;
    size_t first_bucket_bytes = size_t{1} << 20;
    ReduceOp op = ReduceOp::avg;
    double pre_divide = 1;
    bool find_unused = false;
    bool static_graph = false;
    bool rebuild_buckets = false;
    std::optional<DType> reduce_dtype;
    DdpHook hook = DdpHook::all_reduce;
    int power_sgd_rank = 1;
    int64_t power_sgd_start_step = 1000;
    DdpJoin join = DdpJoin::off;
    bool share_params = false;
    bool compares = false;  // Ddp::compare(); on the CPU, not with share_params
};

// Throws INVALID_ARGUMENT or UNSUPPORTED for an invalid model or invalid options.
void check_model(const std::vector<NamedTensor>& params, const DdpOptions& options);

// Throws UNSUPPORTED for what gradients on a device cannot have, or only with kernels that it lacks.
void check_for_device(const std::vector<NamedTensor>& params, const DdpOptions& options, bool has_slices,
                      Device device);

// One line per option and parameter for check_same_on_all_ranks (comm/fingerprint.hpp).
[[nodiscard]] std::vector<std::string> description(const std::vector<NamedTensor>& params, const DdpOptions& options);

}  // namespace tsr
