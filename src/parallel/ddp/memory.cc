// Where a model's gradients are stored and how they are grouped, and where its parameters are: in the trainer's memory
// or in the host's copy.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/page_size.hpp"
#include "base/round_up.hpp"
#include "parallel/ddp/ddp.hpp"
#include "tensor/convert.hpp"

namespace tsr {

namespace {

constexpr size_t compared_elements = 2 * 64;

void copy(const Tensor& from, const Tensor& to) {
    if (from.size_bytes() > 0) std::memcpy(to.data, from.data, from.size_bytes());
}

}  // namespace

Ddp::Layout Ddp::layout_of_gradients() const {
    std::vector<Tensor> params;
    for (const NamedTensor& param : params_) params.push_back(param.tensor);
    Layout layout{std::vector<size_t>(params.size())};
    const auto order = reverse_order(params.size());
    for (const Bucket& bucket : plan_buckets(params, {options_.first_bucket_bytes, options_.bucket_bytes}, order)) {
        for (const auto& slot : bucket.slots) layout.places[slot.param] = layout.size + slot.offset;
        layout.size += round_up(bucket.size, page_size);
        if (!options_.reduce_dtype) continue;
        // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): dtypes of size 0 were rejected earlier
        const size_t converted = bucket.size / size_of(bucket.dtype) * size_of(*options_.reduce_dtype);
        layout.converted_size = std::max(layout.converted_size, round_up(converted, page_size));
    }
    layout.compared = layout.size;
    if (options_.compares) layout.size += round_up(compared_elements * sizeof(double), page_size);
    return layout;
}

void Ddp::lay_out_gradients(const Layout& layout, std::shared_ptr<DeviceGrads> device) {
    reducer_ = std::make_shared<Reducer>(comm_, options_, layout.size, std::move(device));
    compared_bits_.data = reducer_->memory() + layout.compared;
    for (size_t i = 0; i < params_.size(); ++i) {
        grads_.push_back(params_[i].tensor);
        grads_[i].data = reducer_->memory() + layout.places[i];
    }
    group(reverse_order(params_.size()));
    step_.ready.assign(params_.size(), 0);
    has_grad_.assign(params_.size(), 0);
    globally_used_.assign(params_.size(), 0);
}

// Plans the buckets of gradients that arrive in `order`; the gradients stay in place.
void Ddp::group(std::span<const size_t> order) {
    buckets_ = plan_buckets(grads_, {options_.first_bucket_bytes, options_.bucket_bytes}, order);
    bucket_of_.resize(params_.size());
    stats_.clear();
    timed_ = true;
    std::vector<BucketView> views;
    for (size_t b = 0; b < buckets_.size(); ++b) {
        std::vector<size_t> members;
        for (const auto& slot : buckets_[b].slots) members.push_back(slot.param);
        std::sort(members.begin(), members.end(),
                  [this](size_t x, size_t y) { return std::pair(grads_[x].data, x) < std::pair(grads_[y].data, y); });
        BucketView view;
        view.bucket = b;
        if (const DeviceGrads* device = reducer_->device()) view.stream = device->own();
        for (const size_t param : members) {
            bucket_of_[param] = b;
            const Tensor& grad = grads_[param];
            view.params.push_back(param);
            view.grads.push_back(grad);
            const size_t slot = round_up(grad.size_bytes(), slot_alignment);
            if (slot == 0) continue;
            // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): dtypes of size 0 were rejected earlier
            const auto elements = static_cast<int64_t>(slot / size_of(grad.dtype));
            Tensor* last = view.ranges.empty() ? nullptr : &view.ranges.back();
            if (last != nullptr && last->data + last->size_bytes() == grad.data) {
                last->shape[0] += elements;
            } else {
                view.ranges.push_back({grad.data, Dims{elements}, grad.dtype, grad.device});
            }
        }
        stats_.push_back({view.size_bytes(), view.params.size(), {}, {}, {}, {}});
        views.push_back(std::move(view));
    }
    if (options_.compares) {
        compared_with_ = views.size() - 1;
        while (compared_with_ > 0 && views[compared_with_].ranges.empty()) --compared_with_;
        compared_bits_.dtype = buckets_[compared_with_].dtype;
        compared_bits_.shape = Dims{compared_elements};
        views[compared_with_].ranges.push_back(compared_bits_);
    }
    const auto set_buckets = [&] { reducer_->set_buckets(std::move(views)); };
    if (reducer_->device() == nullptr) {
        set_buckets();
    } else {
        on_device([&](DeviceGrads&) { set_buckets(); });
    }
    reset_step();
}

void Ddp::write_compared() {
    std::array<float, compared_elements> bits;
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = (compared_ >> (i / 2) & 1) == i % 2 ? 1 : 0;
    convert(reinterpret_cast<const std::byte*>(bits.data()), DType::f32, compared_bits_.data, compared_bits_.dtype,
            compared_elements);
}

// In a sum or mean, both elements of a bit are above zero only if ranks differ in it.
bool Ddp::read_agreement() const {
    std::array<float, compared_elements> sums;
    convert(compared_bits_.data, compared_bits_.dtype, reinterpret_cast<std::byte*>(sums.data()), DType::f32,
            compared_elements);
    for (size_t i = 0; i < sums.size(); i += 2) {
        if (sums[i] > 0 && sums[i + 1] > 0) return false;
    }
    return true;
}

// The gradients have the parameters' sizes and are accessible to the transport, so they are used to send the values.
void Ddp::broadcast_values(int from) {
    if (reducer_->device() != nullptr) return broadcast_on_device(from);
    const bool is_source = comm_->rank() == from;
    for (const BucketView& bucket : reducer_->buckets()) {
        if (bucket.ranges.empty()) continue;
        if (is_source) {
            for (const size_t i : bucket.params) copy(params_[i].tensor, grads_[i]);
        }
        comm_->run(
            {.collective = Collective::broadcast, .outputs = bucket.ranges, .peer = from, .label = "parameters"});
        if (is_source) continue;
        for (const size_t i : bucket.params) copy(grads_[i], params_[i].tensor);
    }
}

// In place, since a device's transport reaches the parameters.
void Ddp::broadcast_on_device(int from) {
    for (const BucketView& bucket : reducer_->buckets()) {
        std::vector<Tensor> values;
        for (const size_t i : bucket.params) {
            if (params_[i].tensor.size_bytes() > 0) values.push_back(params_[i].tensor);
        }
        if (values.empty()) continue;
        reducer_->device()->broadcast(
            *comm_, {.collective = Collective::broadcast, .outputs = values, .peer = from, .label = "parameters"});
    }
}

// Moves the parameters into the host's copy. The registered tensors have rank 0's values by now.
void Ddp::share_params() {
    const auto copy_of_host = std::make_shared<HostCopy>(comm_);
    size_t size = 0;
    for (const NamedTensor& param : params_) size += round_up(param.tensor.size_bytes(), slot_alignment);
    params_memory_ = copy_of_host->allocate(size);
    std::byte* at = params_memory_.get();
    for (size_t i = 0; i < params_.size(); ++i) {
        Tensor shared = params_[i].tensor;
        shared.data = at;
        at += round_up(shared.size_bytes(), slot_alignment);
        if (static_cast<int>(i % static_cast<size_t>(copy_of_host->places())) == copy_of_host->place()) {
            copy(params_[i].tensor, shared);
        }
        params_[i].tensor = shared;
    }
    copy_of_host->meet("shared parameters");
    shared_ = std::make_shared<SharedStep>(reducer_, copy_of_host, stepping_);
}

int64_t Ddp::shared_step() const {
    if (!shared_) {
        throw Error(Code::invalid_state, "the model has no shared parameters; create it with share_params");
    }
    if (!failed_) check_idle("the step of the shared parameters is not known");
    return shared_->copy()->step();
}

}  // namespace tsr
