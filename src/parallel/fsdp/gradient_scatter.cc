#include "parallel/fsdp/gradient_scatter.hpp"

#include <cstring>

#include "base/round_up.hpp"
#include "tensor/arithmetic.hpp"
#include "tensor/convert.hpp"

namespace tsr {

namespace {

// A list has one dtype: calls step(tensors) for those of each.
template <class Step>
void for_dtypes(Step&& step) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) step(dtype);
}

// Memory that begins at a whole cache line.
std::byte* aligned_in(std::vector<std::byte>& memory, size_t size) {
    if (memory.size() < size + fsdp_alignment) memory.assign(size + fsdp_alignment, std::byte{0});
    const auto begin = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (round_up<uintptr_t>(begin, fsdp_alignment) - begin);
}

}  // namespace

GradientScatter::GradientScatter(std::shared_ptr<Communicator> comm, std::shared_ptr<Communicator> replicas,
                                 std::shared_ptr<const FsdpPlan> plan, ScatterOptions options,
                                 std::shared_ptr<std::byte> shards)
    : comm_(std::move(comm)),
      replicas_(std::move(replicas)),
      plan_(std::move(plan)),
      options_(options),
      shards_(std::move(shards)),
      partial_(plan_->units.size()) {}

// What each trained piece of the unit is reduced from and to, the latter one after the other in `memory`.
std::vector<GradientScatter::Part> GradientScatter::parts_of(size_t unit, std::byte* grads,
                                                             std::vector<std::byte>& memory) const {
    std::vector<Part> parts;
    size_t size = 0;
    for (const FsdpPiece& piece : plan_->units[unit].pieces) {
        if (!piece.trained || piece.chunk == 0) continue;
        parts.push_back({&piece,
                         {grads + piece.grad_at, Dims{piece.chunk * comm_->world_size()}, piece.grad_dtype, {}},
                         {nullptr, Dims{piece.chunk}, piece.grad_dtype, {}}});
        size += round_up(parts.back().reduced.size_bytes(), fsdp_alignment);
    }
    std::byte* at = aligned_in(memory, size);
    for (Part& part : parts) {
        part.reduced.data = at;
        at += round_up(part.reduced.size_bytes(), fsdp_alignment);
    }
    return parts;
}

Tensor GradientScatter::shard_of(const Part& part) const {
    return {shards_.get() + part.piece->shard_grad_at, part.reduced.shape, part.piece->dtype, {}};
}

void GradientScatter::scatter(const std::vector<Part>& parts) {
    const bool scales = options_.pre_divide != 1;
    for_dtypes([&](DType dtype) {
        std::vector<Tensor> inputs;
        std::vector<Tensor> outputs;
        for (const Part& part : parts) {
            if (part.whole.dtype != dtype) continue;
            if (scales) divide(part.whole, options_.pre_divide);
            inputs.push_back(part.whole);
            outputs.push_back(part.reduced);
        }
        if (inputs.empty()) return;
        comm_->run({.collective = Collective::reduce_scatter,
                    .inputs = inputs,
                    .outputs = outputs,
                    .op = scales ? ReduceOp::sum : options_.op,
                    .label = "gradients of a unit"});
    });
}

// Over those that hold the same shard, and what is left of the average or the sum.
void GradientScatter::finish(const std::vector<Part>& parts) {
    const bool scales = options_.pre_divide != 1;
    if (replicas_) {
        for_dtypes([&](DType dtype) {
            std::vector<Tensor> tensors;
            for (const Part& part : parts) {
                if (part.reduced.dtype == dtype) tensors.push_back(part.reduced);
            }
            if (tensors.empty()) return;
            replicas_->run({.collective = Collective::all_reduce,
                            .outputs = tensors,
                            .op = scales ? ReduceOp::sum : options_.op,
                            .label = "gradients of replicas"});
        });
    }
    if (!scales) return;
    const int ranks = comm_->world_size() * (replicas_ ? replicas_->world_size() : 1);
    const double rest = (options_.op == ReduceOp::avg ? ranks : 1) / options_.pre_divide;
    for (const Part& part : parts) divide(part.reduced, rest);
}

void GradientScatter::reduce(size_t unit, std::byte* grads, bool add) {
    std::vector<Part> parts = parts_of(unit, grads, scratch_);
    std::vector<std::byte>& partial = partial_[unit];
    for (Part& part : parts) {  // straight into the shard where nothing is between
        if (!add && part.reduced.dtype == part.piece->dtype) part.reduced.data = shard_of(part).data;
    }
    scatter(parts);
    if (!partial.empty()) {
        const std::vector<Part> before = parts_of(unit, grads, partial);
        for (size_t i = 0; i < parts.size(); ++i) tsr::add(parts[i].reduced, before[i].reduced);
        partial = {};
    }
    finish(parts);
    for (const Part& part : parts) {
        const Tensor shard = shard_of(part);
        if (part.reduced.data == shard.data) continue;
        if (!add) {
            convert(part.reduced.data, part.reduced.dtype, shard.data, shard.dtype, shard.numel());
        } else if (part.reduced.dtype == shard.dtype) {
            tsr::add(shard, part.reduced);
        } else {
            Tensor converted = shard;
            converted.data = aligned_in(converted_, shard.size_bytes());
            convert(part.reduced.data, part.reduced.dtype, converted.data, shard.dtype, shard.numel());
            tsr::add(shard, converted);
        }
    }
}

void GradientScatter::reduce_partly(size_t unit, std::byte* grads) {
    const std::vector<Part> parts = parts_of(unit, grads, scratch_);
    scatter(parts);
    const bool first = partial_[unit].empty();
    const std::vector<Part> sums = parts_of(unit, grads, partial_[unit]);
    for (size_t i = 0; i < parts.size(); ++i) {
        if (first) std::memset(sums[i].reduced.data, 0, sums[i].reduced.size_bytes());
        tsr::add(sums[i].reduced, parts[i].reduced);
    }
}

void GradientScatter::forget_partial() {
    for (std::vector<std::byte>& sums : partial_) sums = {};
}

}  // namespace tsr
