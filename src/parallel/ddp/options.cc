#include "parallel/ddp/options.hpp"

#include <fmt/core.h>

#include <cmath>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "parallel/placement.hpp"

namespace tsr {

namespace {

// Rejects what cannot be combined with a shared copy.
void check_shared(const std::vector<NamedTensor>& params, const DdpOptions& options) {
    const char* const other = options.find_unused             ? "find_unused"
                              : options.static_graph          ? "static_graph"
                              : options.join != DdpJoin::off  ? "join"
                              : options.hook == DdpHook::noop ? "hook NOOP"
                                                              : nullptr;
    if (other != nullptr) {
        throw Error(
            Code::unsupported,
            fmt::format("share_params cannot be combined with {}: the ranks of a host would update their shared "
                        "parameters with different gradients; drop one of the two",
                        other));
    }
    for (const auto& [name, tensor] : params) {
        if (tensor.dtype == DType::f32 || tensor.dtype == DType::f64) continue;
        throw Error(
            Code::unsupported,
            fmt::format("share_params cannot be used with parameter \"{}\", which is {}: Tessera's optimizers update "
                        "only f32 and f64",
                        name, is_known(tensor.dtype) ? name_of(tensor.dtype) : "an unknown dtype"));
    }
}

}  // namespace

void check_model(const std::vector<NamedTensor>& params, const DdpOptions& options) {
    if (options.op != ReduceOp::avg && options.op != ReduceOp::sum) {
        throw Error(Code::invalid_argument, "gradients are averaged or summed; op must be AVG or SUM");
    }
    if (!std::isfinite(options.pre_divide) || options.pre_divide <= 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("pre_divide is {}; it must be finite and above 0", options.pre_divide));
    }
    if (options.reduce_dtype && !is_floating(*options.reduce_dtype)) {
        throw Error(Code::invalid_argument,
                    fmt::format("reduce_dtype is {}; it must be f16, bf16, f32 or f64",
                                is_known(*options.reduce_dtype) ? name_of(*options.reduce_dtype) : "unknown"));
    }
    if (options.hook < DdpHook::all_reduce || options.hook > DdpHook::noop) {
        throw Error(Code::invalid_argument,
                    fmt::format("hook is {}; it must be 0 to 2", static_cast<int>(options.hook)));
    }
    if (options.join < DdpJoin::off || options.join > DdpJoin::divide_by_active) {
        throw Error(Code::invalid_argument,
                    fmt::format("join is {}; it must be 0 to 2", static_cast<int>(options.join)));
    }
    if (options.power_sgd_rank < 1 || options.power_sgd_start_step < 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("powersgd_rank is {} and powersgd_start_step is {}; they must be at least 1 and 0",
                                options.power_sgd_rank, options.power_sgd_start_step));
    }
    if (options.share_params) check_shared(params, options);
    check_distinct(params);
    for (const NamedTensor& param : params) check_trained(param);
}

void check_for_device(const std::vector<NamedTensor>& params, const DdpOptions& options, bool has_slices,
                      Device device) {
    const char* const other = has_slices                           ? "a tensor-parallel model"
                              : options.share_params               ? "share_params"
                              : options.hook == DdpHook::power_sgd ? "hook POWER_SGD"
                                                                   : nullptr;
    if (other != nullptr) {
        throw Error(
            Code::unsupported,
            fmt::format("{} is not available for parameters on a CUDA device; drop it, or train on the CPU", other));
    }
    if (options.pre_divide != 1) require_kernels_for("pre_divide", device);
    if (options.join == DdpJoin::divide_by_active) require_kernels_for("join DIVIDE_BY_ACTIVE", device);
    for (const auto& [name, tensor] : params) {
        if (options.reduce_dtype.value_or(tensor.dtype) == tensor.dtype) continue;
        return require_kernels_for(fmt::format("the reduce_dtype {} for \"{}\", which is {},",
                                               name_of(*options.reduce_dtype), name, name_of(tensor.dtype)),
                                   device);
    }
}

std::vector<std::string> description(const std::vector<NamedTensor>& params, const DdpOptions& options) {
    std::vector<std::string> lines{"DDP"};
    const auto option = [&lines](std::string_view name, const auto& value) {
        lines.push_back(fmt::format("the option {} {}", name, value));
    };
    option("op", options.op == ReduceOp::avg ? "avg" : "sum");
    option("bucket_bytes", options.bucket_bytes);
    option("first_bucket_bytes", options.first_bucket_bytes);
    option("pre_divide", options.pre_divide);
    option("find_unused", options.find_unused ? 1 : 0);
    option("static_graph", options.static_graph ? 1 : 0);
    option("rebuild_buckets", options.rebuild_buckets ? 1 : 0);
    option("reduce_dtype", options.reduce_dtype ? name_of(*options.reduce_dtype) : "none");
    option("hook", static_cast<int>(options.hook));
    option("powersgd_rank", options.power_sgd_rank);
    option("powersgd_start_step", options.power_sgd_start_step);
    option("join", static_cast<int>(options.join));
    option("share_params", options.share_params ? 1 : 0);
    for (std::string& line : tsr::description(params, "parameter")) lines.push_back(std::move(line));
    return lines;
}

}  // namespace tsr
