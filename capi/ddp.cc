// tessera/ddp.h: data-parallel training.
#include "tessera/ddp.h"

#include "handles.hpp"

namespace {

using tsr::capi::create;
using tsr::capi::destroy;
using tsr::capi::guard;
using tsr::capi::object_of;
using tsr::capi::options_in;
using tsr::capi::options_init;
using tsr::capi::required;
using tsr::capi::tensor_in;
using tsr::capi::tensor_out;
using tsr::capi::text;

constexpr tsr_ddp_options default_options{sizeof(tsr_ddp_options), size_t{25} << 20, size_t{1} << 20, TSR_REDUCE_AVG};

std::vector<tsr::NamedTensor> params_in(const tsr_param* params, size_t n) {
    required(params, "params");
    std::vector<tsr::NamedTensor> out;
    out.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        const std::string name = text(params[i].name, "a parameter's name");
        const std::string what = fmt::format("parameter {} (\"{}\")", i, name);
        out.push_back({name, tensor_in(&params[i].tensor, what.c_str())});
    }
    return out;
}

}  // namespace

extern "C" {

tsr_status tsr_ddp_options_init(tsr_ddp_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_ddp_create(tsr_comm* comm, const tsr_param* params, size_t n, const tsr_ddp_options* options,
                          tsr_ddp** out) {
    return guard([&] {
        create(out, [&] {
            const auto& ranks = object_of(comm, "comm");
            const auto o = options_in(options, default_options, "options");
            return std::make_shared<tsr::Ddp>(
                ranks, params_in(params, n),
                tsr::DdpOptions{o.bucket_bytes, o.first_bucket_bytes, static_cast<tsr::ReduceOp>(o.op)});
        });
    });
}

tsr_status tsr_ddp_param_count(const tsr_ddp* ddp, size_t* count) {
    return guard([&] { required(count, "count") = object_of(ddp, "ddp")->params().size(); });
}

tsr_status tsr_ddp_param(const tsr_ddp* ddp, size_t index, tsr_param* param) {
    return guard([&] {
        const auto& [name, tensor] = object_of(ddp, "ddp")->param(index);
        required(param, "param") = {name.c_str(), tensor_out(tensor)};
    });
}

tsr_status tsr_ddp_grad(const tsr_ddp* ddp, size_t index, tsr_tensor* grad) {
    return guard([&] { required(grad, "grad") = tensor_out(object_of(ddp, "ddp")->grad(index)); });
}

tsr_status tsr_ddp_ready(tsr_ddp* ddp, size_t index) {
    return guard([&] { object_of(ddp, "ddp")->ready(index); });
}

tsr_status tsr_ddp_ready_all(tsr_ddp* ddp) {
    return guard([&] { object_of(ddp, "ddp")->ready_all(); });
}

tsr_status tsr_ddp_wait(tsr_ddp* ddp) {
    return guard([&] { object_of(ddp, "ddp")->wait(); });
}

tsr_status tsr_ddp_zero_grad(tsr_ddp* ddp) {
    return guard([&] { object_of(ddp, "ddp")->zero_grad(); });
}

void tsr_ddp_destroy(tsr_ddp* ddp) { destroy(ddp); }

}  // extern "C"
