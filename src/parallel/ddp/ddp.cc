#include "parallel/ddp/ddp.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/reentry.hpp"
#include "comm/fingerprint.hpp"

namespace tsr {

namespace {

constexpr size_t page = 4096;
constexpr size_t names_in_message = 8;

size_t page_aligned(size_t size) { return (size + page - 1) / page * page; }

void check(const std::vector<NamedTensor>& params, const DdpOptions& options) {
    if (params.empty()) throw Error(Code::invalid_argument, "a model without parameters");
    if (options.op != ReduceOp::avg && options.op != ReduceOp::sum) {
        throw Error(Code::invalid_argument, "gradients are averaged or summed; op must be AVG or SUM");
    }
    std::unordered_set<std::string_view> names;
    for (const auto& [name, tensor] : params) {
        if (name.empty()) throw Error(Code::invalid_argument, "a parameter's name is empty");
        if (!names.insert(name).second) {
            throw Error(Code::invalid_argument, fmt::format("two parameters are named \"{}\"", name));
        }
        if (!is_floating(tensor.dtype)) {
            throw Error(Code::invalid_argument,
                        fmt::format("parameter \"{}\" is {}; a parameter is a floating-point tensor", name,
                                    name_of(tensor.dtype)));
        }
        if (tensor.device.type != DeviceType::cpu) {
            throw Error(Code::unsupported, fmt::format("parameter \"{}\" is not on the CPU", name));
        }
    }
}

std::vector<std::string> description(const std::vector<NamedTensor>& params, const DdpOptions& options) {
    std::vector<std::string> lines;
    lines.reserve(params.size() + 1);
    lines.push_back(fmt::format("the options op {}, bucket_bytes {}, first_bucket_bytes {}",
                                options.op == ReduceOp::avg ? "avg" : "sum", options.bucket_bytes,
                                options.first_bucket_bytes));
    for (size_t i = 0; i < params.size(); ++i) {
        const auto& [name, tensor] = params[i];
        lines.push_back(fmt::format("parameter {} \"{}\" {} {}", i, name, name_of(tensor.dtype), tensor.shape.str()));
    }
    return lines;
}

}  // namespace

std::string without_wrappers(std::string name) {
    for (bool found = true; found;) {
        found = false;
        for (const std::string_view prefix : {"module.", "_orig_mod."}) {
            if (!name.starts_with(prefix)) continue;
            name.erase(0, prefix.size());
            found = true;
        }
    }
    return name;
}

Ddp::Ddp(std::shared_ptr<Communicator> comm, std::vector<NamedTensor> params, const DdpOptions& options)
    : comm_(std::move(comm)), params_(std::move(params)), options_(options) {
    for (NamedTensor& param : params_) param.name = without_wrappers(std::move(param.name));
    check(params_, options_);
    check_same_on_all_ranks(*comm_, description(params_, options_), "the ranks' models differ");
    lay_out_gradients();
    broadcast_values();
}

// Work that is still running writes into the buckets, so they live until it is done.
Ddp::~Ddp() {
    for (const WorkPtr& work : works_) {
        if (work && !work->done()) work->on_done([buffer = buffer_](const std::optional<Error>&) {});
    }
}

void Ddp::lay_out_gradients() {
    std::vector<Tensor> tensors;
    tensors.reserve(params_.size());
    for (const NamedTensor& param : params_) tensors.push_back(param.tensor);
    buckets_ = plan_buckets(tensors, {options_.first_bucket_bytes, options_.bucket_bytes});

    size_t size = 0;
    for (const Bucket& bucket : buckets_) {
        bucket_offsets_.push_back(size);
        size += page_aligned(bucket.size);
    }
    buffer_ = comm_->allocate(std::max(size, page));

    grads_ = std::move(tensors);
    bucket_of_.resize(params_.size());
    ready_.assign(params_.size(), 0);
    for (size_t b = 0; b < buckets_.size(); ++b) {
        missing_.push_back(buckets_[b].slots.size());
        for (const auto& [param, offset] : buckets_[b].slots) {
            bucket_of_[param] = b;
            grads_[param].data = buffer_->data() + bucket_offsets_[b] + offset;
        }
    }
}

Tensor Ddp::bucket_tensor(size_t bucket) const {
    const auto& [dtype, slots, size] = buckets_[bucket];
    const auto elements = static_cast<int64_t>(size / size_of(dtype));
    return {buffer_->data() + bucket_offsets_[bucket], Dims{elements}, dtype, {}};
}

// The buckets have the parameters' sizes and lie where the transport reaches them, so they carry the values too.
void Ddp::broadcast_values() {
    const bool is_source = comm_->rank() == 0;
    for (size_t b = 0; b < buckets_.size(); ++b) {
        if (buckets_[b].size == 0) continue;
        const auto copy_each = [&](bool to_bucket) {
            for (const auto& slot : buckets_[b].slots) {
                const Tensor& value = params_[slot.param].tensor;
                if (value.size_bytes() == 0) continue;
                std::byte* in_bucket = grads_[slot.param].data;
                std::memcpy(to_bucket ? in_bucket : value.data, to_bucket ? value.data : in_bucket, value.size_bytes());
            }
        };
        if (is_source) copy_each(true);
        const Tensor tensor = bucket_tensor(b);
        comm_->run(
            {.collective = Collective::broadcast, .outputs = {&tensor, 1}, .peer = 0, .label = "initial values"});
        if (!is_source) copy_each(false);
    }
    clear_gradients();
}

void Ddp::clear_gradients() {
    for (size_t b = 0; b < buckets_.size(); ++b) {
        if (buckets_[b].size > 0) std::memset(buffer_->data() + bucket_offsets_[b], 0, buckets_[b].size);
    }
}

const NamedTensor& Ddp::param(size_t index) const {
    if (index < params_.size()) return params_[index];
    throw Error(Code::invalid_argument,
                fmt::format("parameter {} of a model with {} parameters", index, params_.size()));
}

const Tensor& Ddp::grad(size_t index) const {
    (void)param(index);
    return grads_[index];
}

void Ddp::ready(size_t index) {
    const std::string& name = param(index).name;
    if (failed_) throw failure();
    if (ready_[index] != 0) {
        throw Error(Code::invalid_state,
                    fmt::format("rank {}: the gradient of \"{}\" was said to be ready twice in one step; each is said "
                                "once, then all are waited for",
                                comm_->rank(), name))
            .with_rank(comm_->rank());
    }
    ready_[index] = 1;
    ++ready_count_;
    --missing_[bucket_of_[index]];
    launch_full_buckets();
}

void Ddp::ready_all() {
    if (failed_) throw failure();
    std::fill(ready_.begin(), ready_.end(), char{1});
    ready_count_ = ready_.size();
    std::fill(missing_.begin(), missing_.end(), size_t{0});
    launch_full_buckets();
}

void Ddp::launch_full_buckets() {
    try {
        for (; launched_ < buckets_.size() && missing_[launched_] == 0; ++launched_) {
            if (buckets_[launched_].size == 0) {
                works_.push_back(nullptr);
                continue;
            }
            const Tensor tensor = bucket_tensor(launched_);
            works_.push_back(comm_->submit({.collective = Collective::all_reduce,
                                            .outputs = {&tensor, 1},
                                            .op = options_.op,
                                            .label = bucket_label(launched_)}));
        }
    } catch (const Error& error) {
        failed_ = error;
        throw;
    }
}

void Ddp::wait() {
    const Reentry once(this, "the model of communicator", comm_->name());
    if (failed_) throw failure();
    if (ready_count_ < params_.size()) {
        std::string names;
        size_t listed = 0;
        for (size_t i = 0; i < params_.size() && listed < names_in_message; ++i) {
            if (ready_[i] != 0) continue;
            names += fmt::format("{}\"{}\"", listed++ > 0 ? ", " : "", params_[i].name);
        }
        const size_t missing = params_.size() - ready_count_;
        if (missing > listed) names += fmt::format(" and {} more", missing - listed);
        throw Error(Code::invalid_state,
                    fmt::format("rank {}: {} of {} gradients were never said to be ready: {}; say so (a gradient that "
                                "this step does not have is zero) and wait again",
                                comm_->rank(), missing, params_.size(), names))
            .with_rank(comm_->rank());
    }
    // Each collective ends by its own deadline; this one only guards against a work that is never finished.
    const auto deadline =
        Deadline::in(comm_->options().timeout * static_cast<int64_t>(works_.size() + 1) + milliseconds{10000});
    for (const WorkPtr& work : works_) {
        if (!work) continue;
        try {
            work->wait(deadline);
        } catch (const Error& error) {
            if (error.code() == Code::interrupted) throw;  // the step goes on; the caller may wait again
            failed_ = error;
            throw;
        }
    }
    works_.clear();
    launched_ = 0;
    ready_count_ = 0;
    std::fill(ready_.begin(), ready_.end(), char{0});
    for (size_t b = 0; b < buckets_.size(); ++b) missing_[b] = buckets_[b].slots.size();
}

void Ddp::zero_grad() {
    check_idle("gradients cannot be set to zero");
    clear_gradients();
}

void Ddp::check_idle(const char* what) const {
    if (failed_) {
        throw Error(Code::invalid_state, fmt::format("rank {}: {}: their reduction failed", comm_->rank(), what))
            .with_rank(comm_->rank())
            .caused_by(*failed_);
    }
    if (ready_count_ == 0) return;
    throw Error(
        Code::invalid_state,
        fmt::format("rank {}: {} while they are being reduced; wait for the gradients first", comm_->rank(), what))
        .with_rank(comm_->rank());
}

Error Ddp::failure() const {
    return Error(Code::aborted,
                 fmt::format("rank {}: gradients cannot be reduced any more: {}", comm_->rank(), failed_->what()))
        .with_rank(comm_->rank())
        .caused_by(*failed_);
}

}  // namespace tsr
