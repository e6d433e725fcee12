#include "parallel/fsdp/gradient_scatter.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "base/round_up.hpp"
#include "tensor/arithmetic.hpp"
#include "tensor/convert.hpp"

namespace tsr {

namespace {

// A list of tensors has one dtype: calls step(dtype) for each.
template <class Step>
void for_dtypes(Step&& step) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) step(dtype);
}

// Memory inside `memory` that begins at a cache line.
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

// The source of each trained piece of the unit; the destination is set later.
std::vector<GradientScatter::Part> GradientScatter::parts_of(size_t unit, std::byte* grads) const {
    std::vector<Part> parts;
    for (const FsdpPiece& piece : plan_->units[unit].pieces) {
        if (!piece.trained || piece.chunk == 0) continue;
        parts.push_back({&piece,
                         {grads + piece.grad_at, Dims{piece.chunk * comm_->world_size()}, piece.grad_dtype, {}},
                         {nullptr, Dims{piece.chunk}, piece.grad_dtype, {}}});
    }
    return parts;
}

// Places parts without a destination in `memory`, one after another.
void GradientScatter::place(std::vector<Part>& parts, std::vector<std::byte>& memory) {
    const auto taken = [](const Part& part) {
        return part.reduced.data != nullptr ? 0 : round_up(part.reduced.size_bytes(), fsdp_alignment);
    };
    size_t size = 0;
    for (const Part& part : parts) size += taken(part);
    if (size == 0) return;
    std::byte* at = aligned_in(memory, size);
    for (Part& part : parts) {
        const size_t of_part = taken(part);
        if (of_part > 0) part.reduced.data = at;
        at += of_part;
    }
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

// Reduces over the ranks that hold the same shard.
void GradientScatter::reduce_over_replicas(const std::vector<Part>& parts) {
    if (!replicas_) return;
    for_dtypes([&](DType dtype) {
        std::vector<Tensor> tensors;
        for (const Part& part : parts) {
            if (part.reduced.dtype == dtype) tensors.push_back(part.reduced);
        }
        if (tensors.empty()) return;
        replicas_->run({.collective = Collective::all_reduce,
                        .outputs = tensors,
                        .op = options_.pre_divide != 1 ? ReduceOp::sum : options_.op,
                        .label = "gradients of replicas"});
    });
}

// Applies the remaining factor of the average or sum, converts and adds. If it does more than one of these, it does all
// of them to a block while that is in the cache.
void GradientScatter::store(const Part& part, bool add) const {
    const bool scales = options_.pre_divide != 1;
    const int ranks = comm_->world_size() * (replicas_ ? replicas_->world_size() : 1);
    const double rest = (options_.op == ReduceOp::avg ? ranks : 1) / options_.pre_divide;
    const Tensor shard = shard_of(part);
    if (!scales && part.reduced.data == shard.data) return;
    const bool converts = part.reduced.dtype != shard.dtype;
    constexpr int64_t in_cache = 2048;
    const int passes = static_cast<int>(scales) + static_cast<int>(converts) + static_cast<int>(add);
    const int64_t block = passes > 1 ? in_cache : shard.numel();
    alignas(fsdp_alignment) std::array<std::byte, in_cache * size_of(DType::f64)> memory;
    for (int64_t begin = 0; begin < shard.numel(); begin += block) {
        const auto of_block = [&](Tensor tensor) {
            tensor.data += static_cast<size_t>(begin) * size_of(tensor.dtype);
            tensor.shape = Dims{std::min(block, shard.numel() - begin)};
            return tensor;
        };
        const Tensor from = of_block(part.reduced);
        const Tensor to = of_block(shard);
        if (scales) divide(from, rest);
        if (from.data == to.data) continue;
        if (!add) {
            convert(from.data, from.dtype, to.data, to.dtype, to.numel());
        } else if (!converts) {
            tsr::add(to, from);
        } else {
            const Tensor converted{memory.data(), to.shape, to.dtype, {}};
            convert(from.data, from.dtype, converted.data, to.dtype, to.numel());
            tsr::add(to, converted);
        }
    }
}

void GradientScatter::sum_parts(size_t unit, std::byte* grads) const {
    if (!tp_parts_) return;
    std::vector<Tensor> tensors;
    for (const size_t index : plan_->units[unit].params) {
        const FsdpParam& param = plan_->params[index];
        if (!param.trained || !tp_parts_->is_summed(index)) continue;
        tensors.push_back({grads + param.grad_at, param.shape, param.grad_dtype, {}});
    }
    tp_parts_->sum(tensors);
}

void GradientScatter::reduce(size_t unit, std::byte* grads, bool add) {
    sum_parts(unit, grads);
    std::vector<Part> parts = parts_of(unit, grads);
    std::vector<std::byte>& partial = partial_[unit];
    for (Part& part : parts) {  // directly into the shard if nothing needs conversion
        if (!add && part.reduced.dtype == part.piece->dtype) part.reduced.data = shard_of(part).data;
    }
    place(parts, scratch_);
    scatter(parts);
    if (!partial.empty()) {
        std::vector<Part> before = parts_of(unit, grads);
        place(before, partial);
        for (size_t i = 0; i < parts.size(); ++i) tsr::add(parts[i].reduced, before[i].reduced);
        partial = {};
    }
    reduce_over_replicas(parts);
    for (const Part& part : parts) store(part, add);
}

void GradientScatter::reduce_partly(size_t unit, std::byte* grads) {
    sum_parts(unit, grads);
    std::vector<Part> parts = parts_of(unit, grads);
    place(parts, scratch_);
    scatter(parts);
    const bool first = partial_[unit].empty();
    std::vector<Part> sums = parts_of(unit, grads);
    place(sums, partial_[unit]);
    for (size_t i = 0; i < parts.size(); ++i) {
        if (first) std::memset(sums[i].reduced.data, 0, sums[i].reduced.size_bytes());
        tsr::add(sums[i].reduced, parts[i].reduced);
    }
}

void GradientScatter::share(std::vector<uint8_t>& flags) {
    const Tensor tensor = tensor_of(std::span(flags), DType::u8);
    for (Communicator* comm : {comm_.get(), replicas_.get()}) {
        if (comm == nullptr) continue;
        comm->run({.collective = Collective::all_reduce,
                   .outputs = {&tensor, 1},
                   .op = ReduceOp::max,
                   .label = "used parameters"});
    }
}

void GradientScatter::forget_partial() {
    for (std::vector<std::byte>& sums : partial_) sums = {};
}

}  // namespace tsr
