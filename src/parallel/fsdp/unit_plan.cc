#include "parallel/fsdp/unit_plan.hpp"

#include "base/round_up.hpp"

namespace tsr {

void lay_out(FsdpPlan& plan, int ranks, int rank) {
    const auto advance = [](size_t& at, int64_t elements, DType dtype) {
        const size_t place = at;
        at += round_up(static_cast<size_t>(elements) * size_of(dtype), fsdp_alignment);
        return place;
    };
    for (UnitPlan& unit : plan.units) {
        for (const size_t index : unit.params) {
            FsdpParam& param = plan.params[index];
            const int64_t first = chunk(param.shape[0], ranks, 0).end;
            const int64_t row = param.shape[0] > 0 ? param.shape.product() / param.shape[0] : 0;
            param.chunk = first * row;
            param.rows = chunk(param.shape[0], ranks, rank);
            param.shard_shape = param.shape;
            param.shard_shape[0] = param.rows.end - param.rows.begin;
            param.whole_at = advance(unit.whole_size, param.chunk * ranks, param.whole_dtype);
            param.shard_at = advance(plan.shard_size, param.chunk, param.dtype);
            if (!param.trained) continue;
            param.grad_at = advance(unit.grad_size, param.chunk * ranks, param.grad_dtype);
            param.shard_grad_at = advance(plan.shard_grad_size, param.chunk, param.dtype);
        }
    }
}

}  // namespace tsr
