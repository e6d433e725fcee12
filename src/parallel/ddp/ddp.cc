#include "parallel/ddp/ddp.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/reentry.hpp"
#include "comm/fingerprint.hpp"
#include "parallel/placement.hpp"
#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr {

namespace {

constexpr size_t names_in_message = 8;

}  // namespace

Ddp::Ddp(std::shared_ptr<Communicator> comm, std::vector<NamedTensor> params, const DdpOptions& options,
         std::shared_ptr<TensorParallel> slices)
    : comm_(std::move(comm)), params_(std::move(params)), options_(options), slices_(std::move(slices)) {
    for (NamedTensor& param : params_) param.name = without_wrappers(std::move(param.name));
    Layout layout;
    std::shared_ptr<DeviceGrads> on_device;
    const std::vector<std::string> lines = or_refuse_on_all_ranks(*comm_, Compared::models, [&] {
        check_model(params_, options_);
        const Device device = device_of(params_, comm_->device());
        const bool is_on_device = device.type != DeviceType::cpu;
        if (is_on_device) check_for_device(params_, options_, slices_ != nullptr, device);
        if (slices_) take_slices();
        layout = layout_of_gradients();
        if (is_on_device) {
            on_device = std::make_shared<DeviceGrads>(device, layout.size);
            on_device->reserve(layout.converted_size);
        }
        return description(params_, options_);
    });
    check_same_on_all_ranks(*comm_, Compared::models, lines, "the ranks' models differ");
    lay_out_gradients(layout, std::move(on_device));
    if (slices_) reducer_->set_parts(slices_->grad_parts(slice_of_));
    broadcast_values(0);
    if (options_.share_params) share_params();
    zero_memory();
    if (reducer_->device() != nullptr) reducer_->device()->await(*comm_);
}

// Queued reductions keep the reducer alive and use nothing else of this object.
Ddp::~Ddp() = default;

const NamedTensor& Ddp::param(size_t index) const {
    if (index < params_.size()) return params_[index];
    throw no_such("parameter", index, params_.size());
}

const Tensor& Ddp::grad(size_t index) const {
    (void)param(index);
    return grads_[index];
}

void Ddp::take_slices() {
    if (options_.share_params) {
        throw Error(Code::unsupported,
                    "share_params cannot be combined with a tensor-parallel model: the ranks of a host have different "
                    "slices; drop one of the two");
    }
    slices_->check_data_ranks(*comm_);
    for (const NamedTensor& param : params_) slice_of_.push_back(slices_->find_slice(param));
}

std::optional<Held> Ddp::held(size_t index) const {
    if (!slices_) return std::nullopt;
    return slices_->held(slice_of_[index]);
}

// --- a step

void Ddp::begin_step() {
    if (step_.begun) return;
    if (shared_ && !stepping_->is_on()) {
        throw refusal(Code::invalid_state,
                      "a model with share_params needs an optimizer, which updates the parameters during the step; "
                      "create one from this model before the first step");
    }
    if (shared_) shared_->copy()->check_whole();  // a load may have failed
    if (sync_ && reducer_->device() != nullptr) [[unlikely]]
        begin_step_on_device();
    if (sync_ && options_.join != DdpJoin::off) {
        step_.works.push_back(submit([reducer = reducer_] { reducer->announce(Reducer::Presence::steps); }));
    }
    step_.begun = true;
    step_.begin = Clock::now();
}

void Ddp::ready(size_t index) {
    const std::string& name = param(index).name;
    if (failed_) throw failure();
    if (step_.ready[index] != 0) {
        throw refusal(
            Code::invalid_state,
            fmt::format("the gradient of \"{}\" was marked ready twice in one step; call ready() once per step, after "
                        "its last write, then end the step",
                        name));
    }
    if (!may_be_ready(index)) {
        throw refusal(
            Code::invalid_state,
            fmt::format("the gradient of \"{}\" was marked ready, but not in the first step; if steps differ, "
                        "use find_unused instead of static_graph",
                        name));
    }
    const size_t bucket = bucket_of_[index];
    const bool fills = bucket == step_.launched && step_.missing[bucket] == 1;
    if (!fills && (step_.begun || options_.join == DdpJoin::off)) {  // nothing is issued
        begin_step();
        return count_ready(index);
    }
    issue([&] {
        begin_step();
        count_ready(index);
        launch_full_buckets();
    });
}

void Ddp::count_ready(size_t param) {
    step_.ready[param] = has_grad_[param] = 1;
    if (synced_steps_ == 0) step_.arrivals.push_back(param);
    if (--step_.missing[bucket_of_[param]] == 0) reducer_->times()[bucket_of_[param]].ready = Clock::now();
}

bool Ddp::may_be_ready(size_t param) const {
    if (!options_.static_graph || synced_steps_ == 0) return true;
    return globally_used_[param] != 0 && (expected_.empty() || expected_[param] != 0);
}

void Ddp::ready_all() {
    if (failed_) throw failure();
    if (step_.all_said) {
        throw refusal(Code::invalid_state,
                      "all gradients were marked ready twice in one step; end the step before the next one");
    }
    issue([&] {
        begin_step();
        for (size_t i = params_.size(); i-- > 0;) {
            if (step_.ready[i] == 0 && may_be_ready(i)) count_ready(i);
        }
        launch_full_buckets();
    });
    step_.all_said = sync_;
}

WorkPtr Ddp::submit(std::function<void()> job) {
    try {
        return comm_->submit_job(std::move(job));
    } catch (const Error& error) {
        // An earlier job of this step may be the cause, and its error says more.
        if (error.code() == Code::aborted) await_works();
        failed_ = cause_of(error);
        throw Error(*failed_);
    }
}

void Ddp::launch_full_buckets() {
    if (!sync_) return;
    for (; step_.launched < buckets_.size() && step_.missing[step_.launched] == 0; ++step_.launched)
        launch(step_.launched, Role::own);
}

void Ddp::launch(size_t bucket, Role role) {
    if (reducer_->device() != nullptr) [[unlikely]]
        return launch_on_device(bucket, role);
    const BucketView& view = reducer_->buckets()[bucket];
    if (shared_) {
        if (view.ranges.empty()) return;
        step_.works.push_back(
            submit([shared = shared_, bucket, step = synced_steps_] { shared->reduce_and_update(bucket, step); }));
        return;
    }
    const bool steps = stepping_->is_on();
    std::vector<size_t> update;  // updated by the optimizer as soon as the bucket is reduced
    if (role == Role::own) {
        for (const size_t i : view.params) {
            if (has_grad_[i] == 0) {
                set_aside(i);
            } else if (steps) {
                update.push_back(i);
            }
        }
    }
    if (view.ranges.empty()) return;
    if (options_.compares && bucket == compared_with_) write_compared();
    step_.works.push_back(
        submit([reducer = reducer_, bucket, step = synced_steps_, stepping = stepping_, update = std::move(update)] {
            reducer->reduce(bucket, step);
            if (!update.empty()) stepping->step(update);
        }));
}

// This rank contributes zeros for a gradient that it does not have. If no rank has it, the old values are restored.
void Ddp::set_aside(size_t param) {
    const Tensor& grad = grads_[param];
    if (grad.size_bytes() == 0) return;
    if (shares_used() || globally_used_[param] == 0) {
        step_.set_aside.emplace_back(param, std::vector<std::byte>(grad.data, grad.data + grad.size_bytes()));
    }
    std::memset(grad.data, 0, grad.size_bytes());
}

// End of backward: a gradient that is not ready now is missing or unused.
void Ddp::close_step() {
    std::vector<size_t> unsaid;  // in this step
    std::vector<size_t> absent;  // nor in an earlier step without synchronisation
    for (size_t i = 0; i < params_.size(); ++i) {
        if (step_.ready[i] != 0 || (!expected_.empty() && expected_[i] == 0)) continue;
        unsaid.push_back(i);
        if (has_grad_[i] == 0) absent.push_back(i);
    }
    const bool may_lack = options_.find_unused || (options_.static_graph && expected_.empty());
    if (!absent.empty() && !may_lack) {
        const char* const advice =
            expected_.empty()
                ? "mark them ready (with zeros if this step did not use them), then end the step again, or create the "
                  "model with the option find_unused"
                : "the first step on this rank had them: mark them ready, then end the step again, or use the option "
                  "find_unused instead of static_graph";
        throw refusal(Code::invalid_state, fmt::format("{} of {} gradients were never marked ready: {}; {}",
                                                       absent.size(), params_.size(), names_of(absent), advice));
    }
    const bool all_issued =
        step_.begun && step_.launched == buckets_.size() && !shares_used() && !shared_ && !learns_order();
    if (all_issued) {
        launch_used();
    } else {
        issue([&] {
            begin_step();
            for (const size_t i : unsaid) {
                step_.ready[i] = 1;
                if (--step_.missing[bucket_of_[i]] == 0) reducer_->times()[bucket_of_[i]].ready = Clock::now();
            }
            launch_full_buckets();
            launch_used();
            if (shared_) step_.works.push_back(submit([shared = shared_, step = synced_steps_] { shared->end(step); }));
            launch_order();
        });
    }
    step_.closed = true;
}

// After the last bucket.
void Ddp::launch_used() {
    reducer_->used().assign(has_grad_.begin(), has_grad_.end());
    if (shares_used()) step_.works.push_back(submit([reducer = reducer_] { reducer->share_used(); }));
}

// Last in the first step: every rank groups its buckets by rank 0's order of arrival. Parameters that rank 0 did not
// see come last.
void Ddp::launch_order() {
    if (!learns_order()) return;
    step_.order = std::make_shared<std::vector<int64_t>>(step_.arrivals.begin(), step_.arrivals.end());
    std::vector<char> seen(params_.size(), 0);
    for (const size_t i : step_.arrivals) seen[i] = 1;
    for (const size_t i : reverse_order(params_.size())) {
        if (seen[i] == 0) step_.order->push_back(static_cast<int64_t>(i));
    }
    step_.works.push_back(submit([comm = comm_, order = step_.order] {
        const Tensor tensor = tensor_of(std::span<int64_t>(*order), DType::i64);
        comm->run(
            {.collective = Collective::broadcast, .outputs = {&tensor, 1}, .peer = 0, .label = "order of arrival"});
    }));
}

void Ddp::wait() {
    const Reentry once(this, "the model of communicator", comm_->name());
    if (failed_) throw failure();
    if (!sync_) return reset_step();
    step_.wait_begin = Clock::now();
    if (!step_.closed) close_step();
    await_works();
    finish_step(Role::own);
}

void Ddp::await_works() {
    // Each collective has its own deadline; this one only guards against work that never finishes, such as a hook.
    // PowerSGD needs three collectives per bucket.
    constexpr milliseconds most = std::chrono::hours{24 * 365};  // a longer time may overflow the clock
    const auto deadline = Deadline::in(std::min(
        most, comm_->options().timeout * static_cast<int64_t>(3 * step_.works.size() + 1) + milliseconds{10000}));
    for (const WorkPtr& work : step_.works) {
        try {
            work->wait(deadline);
        } catch (const Error& error) {
            if (error.code() == Code::interrupted) throw;  // the step goes on; the caller may wait again
            failed_ = cause_of(error);
            throw Error(*failed_);
        }
    }
}

void Ddp::finish_step(Role role) {
    if (shares_used()) {
        globally_used_.assign(reducer_->used().begin(), reducer_->used().end());
    } else if (!options_.static_graph) {
        std::fill(globally_used_.begin(), globally_used_.end(), char{1});
    }
    if (role == Role::own) {
        // In reverse: if a gradient was set aside again because its bucket could not be launched, the first copy
        // counts.
        for (auto one = step_.set_aside.rbegin(); one != step_.set_aside.rend(); ++one) {
            const auto& [param, bytes] = *one;
            if (globally_used_[param] == 0) std::memcpy(grads_[param].data, bytes.data(), bytes.size());
        }
        if (options_.static_graph && expected_.empty()) expected_ = has_grad_;
        if (stepping_->is_on()) {
            std::vector<size_t> rest;  // their bucket was reduced before their gradients were known
            for (size_t i = 0; i < params_.size(); ++i) {
                if (has_grad_[i] == 0) rest.push_back(i);
            }
            stepping_->step(rest);
            stepping_->end_step();
        }
        ++own_steps_;
        counter_.count(++averaged_steps_);
        take_stats();
    }
    if (reducer_->device() != nullptr) [[unlikely]]
        end_step_on_device(role);
    std::fill(has_grad_.begin(), has_grad_.end(), char{0});
    if (shared_) shared_->copy()->know_ended(synced_steps_);
    if (options_.compares) ranks_agreed_ = read_agreement();
    ++synced_steps_;
    if (const auto order = std::exchange(step_.order, nullptr)) {
        group(std::vector<size_t>(order->begin(), order->end()));
    } else {
        reset_step();
    }
}

void Ddp::reset_step() {
    step_.works.clear();
    step_.set_aside.clear();
    step_.arrivals.clear();
    step_.launched = 0;
    step_.begun = step_.closed = step_.all_said = false;
    std::fill(step_.ready.begin(), step_.ready.end(), char{0});
    step_.missing.resize(buckets_.size());
    for (size_t b = 0; b < buckets_.size(); ++b) {
        const auto& slots = buckets_[b].slots;
        const auto expected = [this](const auto& slot) { return expected_[slot.param] != 0; };
        const auto all = static_cast<ptrdiff_t>(slots.size());
        step_.missing[b] = static_cast<size_t>(expected_.empty() ? all : std::ranges::count_if(slots, expected));
    }
}

void Ddp::take_stats() {
    timed_ = reducer_->device() == nullptr;
    if (!timed_) return;
    const auto since = [this](Clock::time_point at) { return std::max(at - step_.begin, Clock::duration::zero()); };
    Clock::time_point shown = step_.wait_begin;  // until here the wait is accounted for
    for (size_t b = 0; b < buckets_.size(); ++b) {
        const auto& [ready, start, end] = reducer_->times()[b];
        BucketStats& stats = stats_[b];
        stats = {stats.size_bytes, stats.params, {}, {}, {}, {}};
        if (stats.size_bytes == 0) continue;
        stats.ready = since(ready);
        stats.start = since(start);
        stats.end = since(end);
        if (end <= shown) continue;
        stats.exposed = end - shown;
        shown = end;
    }
}

void Ddp::zero_grad() {
    check_idle("gradients cannot be zeroed");
    zero_memory();
}

// --- between steps

void Ddp::check_reduced_after(int64_t steps) const {
    check_idle("the optimizer cannot use the gradients");
    if (!sync_ || synced_steps_ != steps) return;
    throw refusal(Code::invalid_state,
                  fmt::format("the optimizer steps {}: each rank would use its own; mark them ready and end the step "
                              "first, or turn synchronisation off for this step",
                              steps == 0 ? "before any gradients were reduced"
                                         : "but no gradients were reduced since its last step"));
}

void Ddp::set_sync(bool sync) {
    check_idle("synchronisation cannot be changed");
    sync_ = sync;
}

bool Ddp::used(size_t index) const {
    (void)param(index);
    check_idle("the used gradients are not known");
    return globally_used_[index] != 0;
}

const BucketStats& Ddp::stats(size_t bucket) {
    if (bucket >= stats_.size()) throw no_such("bucket", bucket, stats_.size());
    if (!timed_) take_device_stats();
    return stats_[bucket];
}

void Ddp::set_hook(BucketHook hook) {
    check_idle("the hook cannot be changed");
    reducer_->set_hook(std::move(hook));
}

void Ddp::step_in_backward(Optimizer& optimizer) {
    check_idle("the optimizer cannot be changed");
    if (reducer_->device() != nullptr) {
        throw Error(
            Code::unsupported,
            "an optimizer cannot step in the backward pass of a model on a CUDA device; step it after the wait");
    }
    if (stepping_->is_on()) {
        throw Error(Code::invalid_state,
                    "this model already has an optimizer that steps in backward; destroy it first");
    }
    optimizer.let_others_step();
    stepping_->set(optimizer);
}

void Ddp::forget_optimizer(const Optimizer& ending) { stepping_->forget(ending); }

std::shared_ptr<HostCopy> Ddp::host_copy() const { return shared_ ? shared_->copy() : nullptr; }

// --- errors

void Ddp::check_idle(const char* what) const {
    if (failed_)
        throw refusal(Code::invalid_state, fmt::format("{}: an earlier reduction failed", what)).caused_by(*failed_);
    if (!step_.begun) return;
    throw refusal(Code::invalid_state, fmt::format("{} while gradients are being reduced; end the step first", what));
}

std::string Ddp::names_of(const std::vector<size_t>& indices) const {
    std::string names;
    for (size_t k = 0; k < std::min(indices.size(), names_in_message); ++k) {
        names += fmt::format("{}\"{}\"", k > 0 ? ", " : "", params_[indices[k]].name);
    }
    if (indices.size() > names_in_message) names += fmt::format(" and {} more", indices.size() - names_in_message);
    return names;
}

Error Ddp::refusal(Code code, const std::string& why) const {
    return Error(code, fmt::format("rank {}: {}", comm_->rank(), why)).with_rank(comm_->rank());
}

Error Ddp::failure() const {
    return refusal(Code::aborted, fmt::format("gradients can no longer be reduced: {}", failed_->what()))
        .caused_by(*failed_);
}

}  // namespace tsr
