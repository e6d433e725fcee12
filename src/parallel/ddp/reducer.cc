#include "parallel/ddp/reducer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/page_size.hpp"
#include "base/round_up.hpp"
#include "comm/reduce.hpp"
#include "parallel/ddp/bucket_plan.hpp"
#include "tensor/arithmetic.hpp"
#include "tensor/convert.hpp"

namespace tsr {

namespace {

size_t elements_of(std::span<const Tensor> tensors) {
    size_t elements = 0;
    for (const Tensor& tensor : tensors) elements += static_cast<size_t>(tensor.numel());
    return elements;
}

}  // namespace

size_t BucketView::size_bytes() const {
    size_t size = 0;
    for (const Tensor& range : ranges) size += range.size_bytes();
    return size;
}

Reducer::Reducer(std::shared_ptr<Communicator> comm, const DdpOptions& options, size_t size,
                 std::shared_ptr<DeviceGrads> device)
    : comm_(std::move(comm)),
      options_(options),
      device_(std::move(device)),
      memory_(device_ ? nullptr : comm_->allocate(std::max(size, page_size))),
      size_(size),
      active_(comm_->world_size()) {
    if (options_.hook == DdpHook::power_sgd) power_sgd_.emplace(options_.power_sgd_rank);
}

void Reducer::zero_memory() {
    if (device_) return device_->zero();
    if (size_ > 0) std::memset(memory_->data(), 0, size_);
}

void Reducer::set_buckets(std::vector<BucketView> buckets) {
    buckets_ = std::move(buckets);
    times_.assign(buckets_.size(), {});
    if (!options_.reduce_dtype) return;
    size_t largest = page_size;
    for (const BucketView& bucket : buckets_) {
        largest = std::max(largest, elements_of(bucket.ranges) * size_of(*options_.reduce_dtype));
    }
    if (device_) return device_->reserve(round_up(largest, page_size));
    if (largest <= scratch_size_) return;
    scratch_ = comm_->allocate(largest);
    scratch_size_ = largest;
}

int Reducer::announce(Presence own) {
    const auto world = static_cast<size_t>(comm_->world_size());
    std::vector<uint8_t> all(world);
    std::array<uint8_t, 1> one{static_cast<uint8_t>(own)};
    const Tensor input = tensor_of(std::span<uint8_t>(one), DType::u8);
    const Tensor output = tensor_of(std::span<uint8_t>(all), DType::u8);
    comm_->run({.collective = Collective::all_gather,
                .inputs = {&input, 1},
                .outputs = {&output, 1},
                .label = "ranks with data left"});
    active_ = 0;
    for (size_t r = 0; r < world; ++r) {
        const auto said = static_cast<Presence>(all[r]);
        if (said == Presence::joined) continue;
        if (active_++ == 0) {
            first_active_ = static_cast<int>(r);
            all_do_ = said;
        } else if (said != all_do_) {
            const auto words = [](Presence p) { return p == Presence::steps ? "begins a step" : "broadcasts buffers"; };
            throw Error(Code::mismatch,
                        fmt::format("rank {}: rank {} {}, but rank {} {}; ranks with data left must make the same "
                                    "calls in the same order",
                                    comm_->rank(), first_active_, words(all_do_), r, words(said)))
                .with_rank(comm_->rank())
                .with_peer(static_cast<int>(r));
        }
    }
    return active_;
}

int Reducer::divisor() const { return options_.join == DdpJoin::divide_by_active ? active_ : comm_->world_size(); }

Reducer::Scaling Reducer::scaling_of(ReduceOp op) const {
    const bool avg = op == ReduceOp::avg;
    const double before = options_.pre_divide;
    // The transport itself divides by the number of all ranks.
    if (before == 1 && (!avg || divisor() == comm_->world_size())) return {1, op, 1};
    return {before, ReduceOp::sum, (avg ? divisor() : 1) / before};
}

void Reducer::all_reduce(std::span<const Tensor> tensors, ReduceOp op, std::string_view label) {
    const Scaling scaling = scaling_of(op);
    const auto divide_all = [&](double divisor) {
        if (divisor == 1) return;
        for (const Tensor& tensor : tensors) divide(tensor, divisor);
    };
    divide_all(scaling.before);
    comm_->run({.collective = Collective::all_reduce, .outputs = tensors, .op = scaling.op, .label = label});
    divide_all(scaling.after);
}

// The quotients are part of the conversions, if there are any.
void Reducer::reduce_on_device(const BucketView& bucket) {
    const Scaling scaling = scaling_of(options_.op);
    const auto all_reduce = [&](std::span<const Tensor> tensors) {
        device_->run(*comm_, {.collective = Collective::all_reduce,
                              .outputs = tensors,
                              .op = scaling.op,
                              .label = bucket_label(bucket.bucket)});
    };
    const DType own = bucket.ranges[0].dtype;
    const DType wanted = options_.reduce_dtype.value_or(own);
    if (wanted == own) {
        device_->divide(bucket.ranges, scaling.before);
        all_reduce(bucket.ranges);
        return device_->divide(bucket.ranges, scaling.after);
    }
    const auto elements = static_cast<int64_t>(elements_of(bucket.ranges));
    const Tensor converted{device_->room(), Dims{elements}, wanted, bucket.ranges[0].device};
    std::vector<ConvertedRange> ranges;
    std::byte* at = converted.data;
    for (const Tensor& range : bucket.ranges) {
        const auto count = static_cast<size_t>(range.numel());
        ranges.push_back({range.data, at, count});
        at += count * size_of(wanted);
    }
    device_->convert(ranges, own, wanted, 1, scaling.before);
    all_reduce({&converted, 1});
    for (ConvertedRange& range : ranges) range = {range.to, const_cast<std::byte*>(range.from), range.elements};
    device_->convert(ranges, wanted, own, scaling.after, 1);
}

void Reducer::reduce_in_dtype(const BucketView& bucket) {
    if (device_) [[unlikely]]
        return reduce_on_device(bucket);
    const std::string_view label = bucket_label(bucket.bucket);
    const DType own = bucket.ranges[0].dtype;
    const DType wanted = options_.reduce_dtype.value_or(own);
    if (wanted == own) return all_reduce(bucket.ranges, options_.op, label);
    const Tensor converted{scratch_->data(), Dims{static_cast<int64_t>(elements_of(bucket.ranges))}, wanted, {}};
    const auto each = [&](auto&& copy) {
        std::byte* at = converted.data;
        for (const Tensor& range : bucket.ranges) {
            copy(range, at);
            at += static_cast<size_t>(range.numel()) * size_of(wanted);
        }
    };
    each([&](const Tensor& range, std::byte* at) { convert(range.data, own, at, wanted, range.numel()); });
    all_reduce({&converted, 1}, options_.op, label);
    each([&](const Tensor& range, std::byte* at) { convert(at, wanted, range.data, own, range.numel()); });
}

void Reducer::sum_parts(const BucketView& bucket) const {
    if (!parts_) return;
    std::vector<Tensor> grads;
    for (size_t i = 0; i < bucket.grads.size(); ++i) {
        if (parts_->is_summed(bucket.params[i])) grads.push_back(bucket.grads[i]);
    }
    parts_->sum(grads);
}

void Reducer::reduce(size_t index, int64_t step) {
    const BucketView& bucket = buckets_[index];
    times_[index].start = Clock::now();
    sum_parts(bucket);
    if (hook_) {
        hook_(bucket);
    } else if (power_sgd_ && step >= options_.power_sgd_start_step) {
        BucketView small{.bucket = index};
        std::vector<size_t> params;
        std::vector<Tensor> matrices;
        for (size_t i = 0; i < bucket.grads.size(); ++i) {
            if (power_sgd_->compresses(bucket.grads[i])) {
                params.push_back(bucket.params[i]);
                matrices.push_back(bucket.grads[i]);
            } else if (bucket.grads[i].numel() > 0) {
                small.ranges.push_back(bucket.grads[i]);
            }
        }
        if (!small.ranges.empty()) reduce_in_dtype(small);
        if (!matrices.empty()) {
            const auto average = [&](std::span<float> values) {
                const Tensor tensor = tensor_of(values, DType::f32);
                all_reduce({&tensor, 1}, ReduceOp::avg, bucket_label(index));
            };
            const auto over = static_cast<float>(divisor());
            power_sgd_->reduce(params, matrices, average,
                               {.own = over / static_cast<float>(comm_->world_size()),
                                .result = options_.op == ReduceOp::sum ? over : 1.0F});
        }
    } else if (options_.hook != DdpHook::noop) {
        reduce_in_dtype(bucket);
    }
    times_[index].end = Clock::now();
}

bool Reducer::can_reduce_parts() const {
    return !hook_ && options_.hook == DdpHook::all_reduce && !options_.reduce_dtype && options_.pre_divide == 1 &&
           comm_->transport() == "shm";
}

void Reducer::reduce_slices(std::span<const ParamSlice> slices, DType dtype, const TakeSlice& take) {
    // The size of the transport's blocks: a block of every rank fits in the L2 cache.
    constexpr size_t block = size_t{16} << 10;
    alignas(64) std::array<std::byte, block> sum;
    std::vector<const std::byte*> sources(static_cast<size_t>(comm_->world_size()));
    const size_t element = size_of(dtype);
    for (const ParamSlice& slice : slices) {
        for (size_t done = 0; done < slice.count;) {
            // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): the dtype is a known one
            const size_t n = std::min(block / element, slice.count - done);
            const auto offset = (slice.grad - memory_->data()) + static_cast<ptrdiff_t>(done * element);
            for (size_t r = 0; r < sources.size(); ++r) sources[r] = memory_->of_rank(static_cast<int>(r)) + offset;
            tsr::reduce(sum.data(), sources, n, dtype, options_.op);
            take({slice.param, slice.begin + done, n, sum.data()});
            done += n;
        }
    }
}

void Reducer::share_used() {
    const Tensor tensor = tensor_of(std::span(used_), DType::u8);
    comm_->run({.collective = Collective::all_reduce,
                .outputs = {&tensor, 1},
                .op = ReduceOp::max,
                .label = "used parameters"});
}

}  // namespace tsr
