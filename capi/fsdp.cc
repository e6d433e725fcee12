// tessera/fsdp.h: fully sharded data-parallel training.
#include "tessera/fsdp.h"

#include <optional>

#include "comm/communicator.hpp"
#include "comm/fingerprint.hpp"
#include "handles.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "tensor/layout.hpp"

namespace tsr::capi {

namespace {

constexpr tsr_fsdp_options default_options{.struct_size = sizeof(tsr_fsdp_options),
                                           .shard_ranks = 0,
                                           .forward_prefetch = 1,
                                           .backward_prefetch = 1,
                                           .grads_in_flight = 2,
                                           .param_dtype = 0,
                                           .reduce_dtype = 0,
                                           .op = TSR_REDUCE_AVG,
                                           .pre_divide = 1,
                                           .sync_values = 1,
                                           .tp = nullptr};

std::optional<DType> dtype_in(int32_t dtype) {
    return dtype == 0 ? std::nullopt : std::optional(static_cast<DType>(dtype));
}

FsdpOptions core_options(const tsr_fsdp_options* options) {
    const auto o = options_in(options, default_options, "options");
    FsdpOptions core;
    core.shard_ranks = o.shard_ranks;
    core.forward_prefetch = o.forward_prefetch;
    core.backward_prefetch = o.backward_prefetch;
    core.grads_in_flight = o.grads_in_flight;
    core.param_dtype = dtype_in(o.param_dtype);
    core.reduce_dtype = dtype_in(o.reduce_dtype);
    core.op = static_cast<ReduceOp>(o.op);
    core.pre_divide = o.pre_divide;
    core.sync_values = flag(o.sync_values, "sync_values");
    return core;
}

NamedTensor param_in(const tsr_param& param, const std::string& unit, size_t index) {
    const std::string name = name_in(param.name, "a parameter's name");
    return {name, described_in(param.tensor, fmt::format("parameter {} (\"{}\") of unit \"{}\"", index, name, unit))};
}

FsdpUnit unit_in(const tsr_fsdp_unit& unit, size_t index) {
    FsdpUnit out;
    out.name = name_in(unit.name, "a unit's name");
    if (unit.reserved != 0) {
        throw Error(Code::unsupported, fmt::format("the reserved field of unit {} (\"{}\") is {}, not zero", index,
                                                   out.name, unit.reserved));
    }
    if (unit.n > 0) required(unit.params, "a unit's params");
    for (size_t i = 0; i < unit.n; ++i) {
        out.params.push_back(param_in(unit.params[i], out.name, i));
        if (unit.trained != nullptr) out.trained.push_back(flag(unit.trained[i], "trained"));
    }
    out.reshard_after_forward = unit.reshard_after_forward;
    out.param_dtype = dtype_in(unit.param_dtype);
    out.reduce_dtype = dtype_in(unit.reduce_dtype);
    out.row_block = unit.row_block;
    out.flat = flag(unit.flat, "flat");
    return out;
}

std::vector<FsdpUnit> units_in(const tsr_fsdp_unit* units, size_t n) {
    if (n > 0) required(units, "units");
    std::vector<FsdpUnit> out;
    for (size_t u = 0; u < n; ++u) out.push_back(unit_in(units[u], u));
    return out;
}

// The tensor-parallel model whose slices the parameters are, if any.
std::shared_ptr<TensorParallel> slices_in(const tsr_fsdp_options* options) {
    const auto o = options_in(options, default_options, "options");
    return o.tp == nullptr ? nullptr : object_of(o.tp, "tp");
}

}  // namespace

extern "C" {

tsr_status tsr_fsdp_options_init(tsr_fsdp_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_fsdp_unit_init(tsr_fsdp_unit* unit, size_t struct_size) {
    return guard([&] {
        tsr_fsdp_unit& out = required(unit, "unit");
        if (struct_size != sizeof out) {
            throw Error(Code::invalid_argument,
                        fmt::format("struct_size is {}; a unit has {} bytes in this library", struct_size, sizeof out));
        }
        out = {};
        out.reshard_after_forward = 1;
    });
}

tsr_status tsr_fsdp_create(tsr_comm* comm, const tsr_fsdp_unit* units, size_t n, const tsr_fsdp_options* options,
                           tsr_fsdp** out) {
    return guard([&] {
        create(out, [&] {
            const auto& ranks = object_of(comm, "comm");
            auto model = or_refuse_on_all_ranks(*ranks, Compared::models, [&] {
                return std::tuple(units_in(units, n), core_options(options), slices_in(options));
            });
            return std::make_shared<Fsdp>(ranks, std::move(std::get<0>(model)), std::get<1>(model), std::get<2>(model));
        });
    });
}

tsr_status tsr_fsdp_unit_count(const tsr_fsdp* fsdp, size_t* count) {
    return guard([&] { required(count, "count") = object_of(fsdp, "fsdp")->units(); });
}

tsr_status tsr_fsdp_param_count(const tsr_fsdp* fsdp, size_t* count) {
    return guard([&] { required(count, "count") = object_of(fsdp, "fsdp")->params(); });
}

tsr_status tsr_fsdp_unit_name(const tsr_fsdp* fsdp, size_t unit, const char** name) {
    return guard([&] { required(name, "name") = object_of(fsdp, "fsdp")->unit(unit).name.c_str(); });
}

tsr_status tsr_fsdp_param(const tsr_fsdp* fsdp, size_t index, tsr_param* param, size_t* unit, int32_t* trained) {
    return guard([&] {
        const FsdpParam& found = object_of(fsdp, "fsdp")->param(index);
        if (param != nullptr)
            *param = {found.name.c_str(), tensor_out({nullptr, found.shape, found.dtype, {}}, found.shape)};
        if (unit != nullptr) *unit = found.unit;
        if (trained != nullptr) *trained = found.trained ? 1 : 0;
    });
}

tsr_status tsr_fsdp_unit_phase(const tsr_fsdp* fsdp, size_t unit, int32_t* phase) {
    return guard([&] {
        const UnitPhase found = object_of(fsdp, "fsdp")->phase(unit);
        required(phase, "phase") = static_cast<int32_t>(found);
    });
}

tsr_status tsr_fsdp_shard(const tsr_fsdp* fsdp, size_t index, tsr_param* shard) {
    return guard([&] {
        const auto& model = object_of(fsdp, "fsdp");
        const FsdpParam& param = model->param(index);
        required(shard, "shard") = {param.name.c_str(), tensor_out(model->shard(index), param.shard_shape)};
    });
}

tsr_status tsr_fsdp_shard_grad(const tsr_fsdp* fsdp, size_t index, tsr_tensor* grad) {
    return guard([&] {
        const auto& model = object_of(fsdp, "fsdp");
        required(grad, "grad") = tensor_out(model->shard_grad(index), model->param(index).shard_shape);
    });
}

tsr_status tsr_fsdp_layout(const tsr_fsdp* fsdp, size_t index, tsr_layout** out) {
    return guard(
        [&] { create(out, [&] { return std::make_shared<Layout>(object_of(fsdp, "fsdp")->held(index).layout); }); });
}

tsr_status tsr_fsdp_whole(tsr_fsdp* fsdp, size_t index, tsr_tensor* whole) {
    return guard([&] {
        const auto& model = object_of(fsdp, "fsdp");
        required(whole, "whole") = tensor_out(model->whole(index), model->param(index).shape);
    });
}

tsr_status tsr_fsdp_grad(tsr_fsdp* fsdp, size_t index, tsr_tensor* grad) {
    return guard([&] {
        const auto& model = object_of(fsdp, "fsdp");
        required(grad, "grad") = tensor_out(model->grad(index), model->param(index).shape);
    });
}

tsr_status tsr_fsdp_forward(tsr_fsdp* fsdp, size_t unit) {
    return guard([&] { object_of(fsdp, "fsdp")->forward(unit); });
}

tsr_status tsr_fsdp_forward_done(tsr_fsdp* fsdp, size_t unit) {
    return guard([&] { object_of(fsdp, "fsdp")->forward_done(unit); });
}

tsr_status tsr_fsdp_backward(tsr_fsdp* fsdp, size_t unit) {
    return guard([&] { object_of(fsdp, "fsdp")->backward(unit); });
}

tsr_status tsr_fsdp_unused(tsr_fsdp* fsdp, size_t index) {
    return guard([&] { object_of(fsdp, "fsdp")->unused(index); });
}

tsr_status tsr_fsdp_used(const tsr_fsdp* fsdp, size_t index, int32_t* used) {
    return guard([&] { required(used, "used") = object_of(fsdp, "fsdp")->used(index) ? 1 : 0; });
}

tsr_status tsr_fsdp_grads_ready(tsr_fsdp* fsdp, size_t unit) {
    return guard([&] { object_of(fsdp, "fsdp")->grads_ready(unit); });
}

tsr_status tsr_fsdp_wait(tsr_fsdp* fsdp) {
    return guard([&] { object_of(fsdp, "fsdp")->wait(); });
}

tsr_status tsr_fsdp_abandon(tsr_fsdp* fsdp) {
    return guard([&] { object_of(fsdp, "fsdp")->abandon(); });
}

tsr_status tsr_fsdp_unshard(tsr_fsdp* fsdp, size_t unit) {
    return guard([&] { object_of(fsdp, "fsdp")->unshard(unit); });
}

tsr_status tsr_fsdp_await(tsr_fsdp* fsdp, size_t unit) {
    return guard([&] { object_of(fsdp, "fsdp")->await_unit(unit); });
}

tsr_status tsr_fsdp_reshard(tsr_fsdp* fsdp, size_t unit) {
    return guard([&] { object_of(fsdp, "fsdp")->reshard(unit); });
}

tsr_status tsr_fsdp_set_stream(tsr_fsdp* fsdp, void* stream) {
    return guard([&] { object_of(fsdp, "fsdp")->set_stream(stream); });
}

tsr_status tsr_fsdp_set_sync(tsr_fsdp* fsdp, int32_t sync) {
    return guard([&] { object_of(fsdp, "fsdp")->set_sync(flag(sync, "sync")); });
}

tsr_status tsr_fsdp_set_accumulate(tsr_fsdp* fsdp, int32_t accumulate) {
    return guard([&] { object_of(fsdp, "fsdp")->set_accumulate(flag(accumulate, "accumulate")); });
}

tsr_status tsr_fsdp_set_reshard_after_backward(tsr_fsdp* fsdp, size_t unit, int32_t reshard) {
    return guard([&] { object_of(fsdp, "fsdp")->set_reshard_after_backward(unit, flag(reshard, "reshard")); });
}

tsr_status tsr_fsdp_set_all_reduce(tsr_fsdp* fsdp, int32_t all_reduce) {
    return guard([&] { object_of(fsdp, "fsdp")->set_all_reduce(flag(all_reduce, "all_reduce")); });
}

tsr_status tsr_fsdp_zero_grad(tsr_fsdp* fsdp) {
    return guard([&] { object_of(fsdp, "fsdp")->zero_grad(); });
}

void tsr_fsdp_destroy(tsr_fsdp* fsdp) { destroy(fsdp); }

}  // extern "C"

}  // namespace tsr::capi
