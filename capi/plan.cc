// tessera/plan.h: collectives that are prepared once and launched many times.
#include "tessera/plan.h"

#include "comm/communicator.hpp"
#include "comm/plan.hpp"
#include "handles.hpp"

namespace tsr::capi {

namespace {

static_assert(static_cast<int>(Collective::barrier) == TSR_COLLECTIVE_BARRIER);
static_assert(static_cast<int>(Collective::all_reduce) == TSR_COLLECTIVE_ALL_REDUCE);
static_assert(static_cast<int>(Collective::reduce_scatter) == TSR_COLLECTIVE_REDUCE_SCATTER);
static_assert(static_cast<int>(Collective::all_gather) == TSR_COLLECTIVE_ALL_GATHER);
static_assert(static_cast<int>(Collective::all_gather_v) == TSR_COLLECTIVE_ALL_GATHER_V);
static_assert(static_cast<int>(Collective::broadcast) == TSR_COLLECTIVE_BROADCAST);
static_assert(static_cast<int>(Collective::reduce) == TSR_COLLECTIVE_REDUCE);
static_assert(static_cast<int>(Collective::gather) == TSR_COLLECTIVE_GATHER);
static_assert(static_cast<int>(Collective::scatter) == TSR_COLLECTIVE_SCATTER);
static_assert(static_cast<int>(Collective::all_to_all) == TSR_COLLECTIVE_ALL_TO_ALL);

}  // namespace

extern "C" {

tsr_status tsr_plan_create(tsr_comm* comm, int32_t collective, const tsr_tensor* inputs, size_t n_inputs,
                           const tsr_tensor* outputs, size_t n_outputs, tsr_reduce_op op, int32_t root, void* stream,
                           tsr_plan** out) {
    return guard([&] {
        create(out, [&] {
            const auto& object = object_of(comm, "comm");
            if (collective < TSR_COLLECTIVE_BARRIER || collective > TSR_COLLECTIVE_ALL_TO_ALL) {
                throw Error(Code::invalid_argument,
                            fmt::format("collective is {}; it must be a TSR_COLLECTIVE_ value", collective));
            }
            const std::vector<Tensor> in = tensors_in(inputs, n_inputs, "inputs");
            const std::vector<Tensor> to = tensors_in(outputs, n_outputs, "outputs");
            return object->prepare({.collective = static_cast<Collective>(collective),
                                    .inputs = in,
                                    .outputs = to,
                                    .op = static_cast<ReduceOp>(op),
                                    .peer = root,
                                    .stream = stream});
        });
    });
}

tsr_status tsr_plan_run(tsr_plan* plan) {
    return guard([&] { object_of(plan, "plan")->run(); });
}

tsr_status tsr_plan_start(tsr_plan* plan) {
    return guard([&] { object_of(plan, "plan")->start(); });
}

tsr_status tsr_plan_wait(const tsr_plan* plan, int32_t timeout_ms) {
    return guard([&] { own_object_of(plan, "plan")->wait(patience(timeout_ms)); });
}

void tsr_plan_destroy(tsr_plan* plan) { destroy(plan); }

}  // extern "C"

}  // namespace tsr::capi
