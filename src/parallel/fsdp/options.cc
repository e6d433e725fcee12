#include "parallel/fsdp/options.hpp"

#include <fmt/core.h>

#include <cmath>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "parallel/placement.hpp"

namespace tsr {

namespace {

void check_dtypes(std::optional<DType> param, std::optional<DType> reduce, const std::string& whose) {
    for (const auto& [name, dtype] : {std::pair{"param_dtype", param}, std::pair{"reduce_dtype", reduce}}) {
        if (!dtype || is_floating(*dtype)) continue;
        throw Error(Code::invalid_argument, fmt::format("{}{} is {}; it must be f16, bf16, f32 or f64", whose, name,
                                                        is_known(*dtype) ? name_of(*dtype) : "unknown"));
    }
}

std::string name_of_dtype(const std::optional<DType>& dtype) { return dtype ? std::string(name_of(*dtype)) : "none"; }

}  // namespace

void check_model(const std::vector<FsdpUnit>& units, const FsdpOptions& options, int world_size) {
    if (units.empty()) throw Error(Code::invalid_argument, "the model has no units");
    if (options.op != ReduceOp::avg && options.op != ReduceOp::sum) {
        throw Error(Code::invalid_argument, "gradients are averaged or summed; op must be AVG or SUM");
    }
    check_dtypes(options.param_dtype, options.reduce_dtype, "");
    for (const auto& [name, value, least] : {std::tuple{"shard_ranks", options.shard_ranks, 0},
                                             std::tuple{"forward_prefetch", options.forward_prefetch, 0},
                                             std::tuple{"backward_prefetch", options.backward_prefetch, 0},
                                             std::tuple{"grads_in_flight", options.grads_in_flight, 1}}) {
        if (value >= least) continue;
        throw Error(Code::invalid_argument, fmt::format("{} is {}; it must be at least {}", name, value, least));
    }
    if (options.shard_ranks > 0 && world_size % options.shard_ranks != 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("world size {} is not divisible by shard_ranks {}", world_size, options.shard_ranks));
    }
    if (!std::isfinite(options.pre_divide) || options.pre_divide <= 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("pre_divide is {}; it must be finite and above 0", options.pre_divide));
    }
    std::vector<NamedTensor> all;
    std::set<std::string_view> names;
    std::map<std::string_view, std::string_view> unit_of;  // by the parameter's name
    for (const FsdpUnit& unit : units) {
        if (!names.insert(unit.name).second) {
            throw Error(Code::invalid_argument, fmt::format("two units are named \"{}\"", unit.name));
        }
        check_dtypes(unit.param_dtype, unit.reduce_dtype, fmt::format("unit \"{}\": ", unit.name));
        if (unit.params.empty()) {
            throw Error(Code::invalid_argument, fmt::format("unit \"{}\" has no parameters", unit.name));
        }
        const int kept = unit.reshard_after_forward;
        const int cut = options.shard_ranks > 0 ? options.shard_ranks : world_size;
        if (kept < 0 || (kept > 1 && cut % kept != 0)) {
            throw Error(
                Code::invalid_argument,
                fmt::format(
                    "unit \"{}\": reshard_after_forward is {}; it must be 0, 1 or a divisor of the {} ranks of a "
                    "shard group",
                    unit.name, kept, cut));
        }
        if (unit.row_block < 0) {
            throw Error(Code::invalid_argument,
                        fmt::format("unit \"{}\": row_block is {}; it must be at least 0", unit.name, unit.row_block));
        }
        if (unit.flat && unit.row_block > 0) {
            throw Error(Code::invalid_argument,
                        fmt::format("unit \"{}\" is flat and has row_block {}; a flat unit cannot have a row_block",
                                    unit.name, unit.row_block));
        }
        for (size_t i = 0; i < unit.params.size(); ++i) {
            const NamedTensor& param = unit.params[i];
            if (unit.trained.empty() || unit.trained[i]) check_trained(param);
            if (!unit.flat && param.tensor.shape.ndim() == 0) {
                throw Error(Code::invalid_argument,
                            fmt::format("parameter \"{}\" of unit \"{}\" has no dimension to shard along; give it the "
                                        "shape [1] or make the unit flat",
                                        param.name, unit.name));
            }
            const auto [found, is_new] = unit_of.emplace(param.name, unit.name);
            if (!is_new && found->second != unit.name) {
                throw Error(
                    Code::invalid_argument,
                    fmt::format(
                        "two parameters are named \"{0}\", one in unit \"{1}\" and one in unit \"{2}\"; names must be "
                        "unique in the model: add the unit's name as a prefix, such as \"{2}.{0}\"",
                        param.name, found->second, unit.name));
            }
            all.push_back(param);
        }
    }
    check_distinct(all);
}

Device device_of(const std::vector<FsdpUnit>& units, const std::optional<Device>& own) {
    std::vector<NamedTensor> all;
    for (const FsdpUnit& unit : units) all.insert(all.end(), unit.params.begin(), unit.params.end());
    return device_of(all, own);
}

void check_for_device(const std::vector<FsdpUnit>& units, const FsdpOptions& options, bool has_slices, Device device) {
    if (has_slices) {
        throw Error(Code::unsupported,
                    "a tensor-parallel model is not available for parameters on a CUDA device; train it on the CPU");
    }
    if (options.pre_divide != 1) require_kernels_for("pre_divide", device);
    for (const FsdpUnit& unit : units) {
        const std::optional<DType> param_dtype = unit.param_dtype ? unit.param_dtype : options.param_dtype;
        const std::optional<DType> reduce_dtype = unit.reduce_dtype ? unit.reduce_dtype : options.reduce_dtype;
        for (const auto& [param, tensor] : unit.params) {
            const DType own = tensor.dtype;
            if (!is_floating(own)) continue;
            for (const auto& [name, dtype] :
                 {std::pair{"param_dtype", param_dtype}, std::pair{"reduce_dtype", reduce_dtype}}) {
                if (dtype.value_or(own) == own) continue;
                return require_kernels_for(
                    fmt::format("the {} {} for \"{}\", which is {},", name, name_of(*dtype), param, name_of(own)),
                    device);
            }
        }
    }
}

std::vector<std::string> description(const std::vector<FsdpUnit>& units, const FsdpOptions& options) {
    std::vector<std::string> lines{"FSDP"};
    const auto option = [&lines](std::string_view name, const auto& value) {
        lines.push_back(fmt::format("the option {} {}", name, value));
    };
    option("shard_ranks", options.shard_ranks);
    option("forward_prefetch", options.forward_prefetch);
    option("backward_prefetch", options.backward_prefetch);
    option("grads_in_flight", options.grads_in_flight);
    option("param_dtype", name_of_dtype(options.param_dtype));
    option("reduce_dtype", name_of_dtype(options.reduce_dtype));
    option("op", options.op == ReduceOp::avg ? "avg" : "sum");
    option("pre_divide", options.pre_divide);
    option("sync_values", options.sync_values ? 1 : 0);
    for (const FsdpUnit& unit : units) {
        const auto of_unit = [&](std::string_view name, const auto& value) {
            lines.push_back(fmt::format("unit \"{}\" with {} {}", unit.name, name, value));
        };
        lines.push_back(fmt::format("unit \"{}\" of {} parameters", unit.name, unit.params.size()));
        of_unit("reshard_after_forward", unit.reshard_after_forward);
        of_unit("param_dtype", name_of_dtype(unit.param_dtype));
        of_unit("reduce_dtype", name_of_dtype(unit.reduce_dtype));
        of_unit("row_block", unit.row_block);
        of_unit("flat", unit.flat ? 1 : 0);
        for (std::string& line : description(unit.params, "parameter")) lines.push_back(std::move(line));
        for (size_t i = 0; i < unit.trained.size(); ++i) {
            if (!unit.trained[i]) lines.push_back(fmt::format("parameter \"{}\" is not trained", unit.params[i].name));
        }
    }
    return lines;
}

}  // namespace tsr
