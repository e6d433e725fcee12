#include "parallel/fsdp/device_scatter.hpp"

#include <utility>

#include "base/round_up.hpp"
#include "device/convert.hpp"

namespace tsr {

namespace {

// A list of tensors has one dtype: calls step(dtype) for each.
template <class Step>
void for_dtypes(Step&& step) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) step(dtype);
}

size_t room_for(const Tensor& chunk) { return round_up(chunk.size_bytes(), fsdp_alignment); }

}  // namespace

DeviceScatter::DeviceScatter(std::shared_ptr<const FsdpPlan> plan, Device device, const ScatterOptions& options,
                             std::byte* shards, DeviceLane& lane, DeviceLane& replicas)
    : plan_(std::move(plan)),
      device_(device),
      api_(device_api(device)),
      options_(options),
      shards_(shards),
      lane_(lane),
      replicas_(replicas),
      partial_(plan_->units.size()) {
    if (plan_->ranks == 1) return;
    for (const UnitPlan& unit : plan_->units) {
        for_dtypes([&](DType dtype) {
            size_t size = 0;
            size_t count = 0;
            for (const FsdpPiece& piece : unit.pieces) {
                if (!piece.trained || piece.grad_dtype != dtype) continue;
                size += round_up(static_cast<size_t>(piece.chunk) * size_of(dtype), fsdp_alignment);
                ++count;
            }
            if (count > 1) lane_.reserve(size * static_cast<size_t>(plan_->ranks));
        });
    }
}

std::vector<DeviceScatter::Part> DeviceScatter::parts_of(size_t unit, std::byte* grads) const {
    std::vector<Part> parts;
    const auto place = static_cast<size_t>(lane_.comm().rank());
    for (const FsdpPiece& piece : plan_->units[unit].pieces) {
        if (!piece.trained || piece.chunk == 0) continue;
        Part part{&piece,
                  {grads + piece.grad_at, Dims{piece.chunk * plan_->ranks}, piece.grad_dtype, device_},
                  {nullptr, Dims{piece.chunk}, piece.grad_dtype, device_},
                  {shards_ + piece.shard_grad_at, Dims{piece.chunk}, piece.dtype, device_}};
        part.reduced.data = part.whole.data + place * part.reduced.size_bytes();
        parts.push_back(part);
    }
    return parts;
}

std::vector<std::byte*> DeviceScatter::places_in(const Partial& partial, const std::vector<Part>& parts) {
    std::vector<std::byte*> places;
    std::byte* at = partial.memory.get();
    for (const Part& part : parts) {
        places.push_back(at);
        at += room_for(part.reduced);
    }
    return places;
}

void DeviceScatter::scatter(const std::vector<Part>& parts) {
    for_dtypes([&](DType dtype) {
        std::vector<Part> same;
        std::vector<Tensor> wholes;
        std::vector<Tensor> reduced;
        for (const Part& part : parts) {
            if (part.whole.dtype != dtype) continue;
            same.push_back(part);
            wholes.push_back(part.whole);
            reduced.push_back(part.reduced);
        }
        if (same.size() > 1 && plan_->ranks > 1) {
            scatter_together(same);
        } else if (!same.empty()) {
            reduce_scatter(wholes, reduced);
        }
    });
}

void DeviceScatter::reduce_scatter(std::span<const Tensor> wholes, std::span<const Tensor> reduced) {
    divide_on(api_, wholes, options_.pre_divide, lane_.stream());
    (void)lane_.run({.collective = Collective::reduce_scatter,
                     .inputs = wholes,
                     .outputs = reduced,
                     .op = options_.pre_divide != 1 ? ReduceOp::sum : options_.op,
                     .label = "gradients of a unit"});
}

// As DeviceUnits gathers them.
void DeviceScatter::scatter_together(const std::vector<Part>& parts) {
    const auto ranks = static_cast<size_t>(plan_->ranks);
    size_t size = 0;  // of a rank's part
    for (const Part& part : parts) size += room_for(part.reduced);
    std::byte* const all = lane_.room();
    std::byte* const own = all + static_cast<size_t>(lane_.comm().rank()) * size;
    std::byte* at = all;
    for (const Part& part : parts) {
        const size_t row = part.reduced.size_bytes();
        api_.copy_rows({at, size}, ConstByteRows(part.whole.data, row), ranks, row, lane_.stream());
        at += room_for(part.reduced);
    }
    const DType dtype = parts.front().whole.dtype;
    const auto elements = static_cast<int64_t>(size / size_of(dtype));
    const Tensor wholes{all, Dims{elements * plan_->ranks}, dtype, device_};
    const Tensor reduced{own, Dims{elements}, dtype, device_};
    reduce_scatter({&wholes, 1}, {&reduced, 1});
    at = own;
    for (const Part& part : parts) {
        api_.copy(part.reduced.data, at, part.reduced.size_bytes(), lane_.stream());
        at += room_for(part.reduced);
    }
}

void DeviceScatter::reduce_over_replicas(const std::vector<Part>& parts) {
    replicas_.follow(lane_.stream());
    for_dtypes([&](DType dtype) {
        std::vector<Tensor> tensors;
        for (const Part& part : parts) {
            if (part.reduced.dtype == dtype) tensors.push_back(part.reduced);
        }
        if (tensors.empty()) return;
        (void)replicas_.run({.collective = Collective::all_reduce,
                             .outputs = tensors,
                             .op = options_.pre_divide != 1 ? ReduceOp::sum : options_.op,
                             .label = "gradients of replicas"});
    });
}

// Applies the remaining factor of the average or sum, converts and adds.
WorkPtr DeviceScatter::store(const std::vector<Part>& parts, bool add, DeviceLane& lane) {
    const int ranks = plan_->ranks * (replicas_.is_open() ? replicas_.comm().world_size() : 1);
    const double rest = options_.pre_divide == 1 ? 1 : (options_.op == ReduceOp::avg ? ranks : 1) / options_.pre_divide;
    Conversions conversions;
    for (const auto& [piece, whole, reduced, shard] : parts) {
        if (reduced.data == shard.data && rest == 1) continue;
        conversions[{reduced.dtype, shard.dtype}].push_back(
            {reduced.data, shard.data, static_cast<size_t>(piece->chunk)});
    }
    add ? add_on(api_, conversions, lane.stream(), rest) : convert_on(api_, conversions, lane.stream(), rest);
    return lane.point();
}

WorkPtr DeviceScatter::reduce(size_t unit, std::byte* grads, bool add) {
    std::vector<Part> parts = parts_of(unit, grads);
    if (parts.empty()) return nullptr;
    for (Part& part : parts) {  // directly into the shard if nothing needs conversion
        if (!add && part.reduced.dtype == part.shard.dtype) part.reduced.data = part.shard.data;
    }
    scatter(parts);
    Partial& partial = partial_[unit];
    if (std::exchange(partial.is_set, false)) {
        const std::vector<std::byte*> before = places_in(partial, parts);
        Conversions sums;
        for (size_t i = 0; i < parts.size(); ++i) {
            const auto& [piece, whole, reduced, shard] = parts[i];
            sums[{reduced.dtype, reduced.dtype}].push_back(
                {before[i], reduced.data, static_cast<size_t>(piece->chunk)});
        }
        add_on(api_, sums, lane_.stream());
    }
    if (!replicas_.is_open()) return store(parts, add, lane_);
    reduce_over_replicas(parts);
    return store(parts, add, replicas_);
}

WorkPtr DeviceScatter::reduce_partly(size_t unit, std::byte* grads) {
    const std::vector<Part> parts = parts_of(unit, grads);
    if (parts.empty()) return nullptr;
    Partial& partial = partial_[unit];
    if (!partial.memory) {
        size_t size = 0;
        for (const Part& part : parts) size += room_for(part.reduced);
        partial = {api_.allocate(size), size, false};
    }
    scatter(parts);
    if (!std::exchange(partial.is_set, true)) api_.zero(partial.memory.get(), partial.size, lane_.stream());
    const std::vector<std::byte*> places = places_in(partial, parts);
    Conversions sums;
    for (size_t i = 0; i < parts.size(); ++i) {
        const auto& [piece, whole, reduced, shard] = parts[i];
        sums[{reduced.dtype, reduced.dtype}].push_back({reduced.data, places[i], static_cast<size_t>(piece->chunk)});
    }
    add_on(api_, sums, lane_.stream());
    return lane_.point();
}

void DeviceScatter::forget_partial() {
    for (Partial& partial : partial_) partial.is_set = false;
}

}  // namespace tsr
