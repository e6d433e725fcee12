// What DDP does for gradients on a device.
#include <algorithm>
#include <utility>

#include "parallel/ddp/ddp.hpp"

namespace tsr {

void Ddp::set_stream(StreamHandle stream) {
    check_idle("the stream cannot be changed");
    if (reducer_->device() != nullptr) return reducer_->device()->set_trainer(stream);
    if (stream == nullptr) return;
    throw refusal(Code::invalid_argument,
                  "a stream was passed, but the model's parameters are on the CPU, which has none");
}

// All gradients of the bucket are on the trainer's stream by now. This rank contributes zeros for those that it does not have.
void Ddp::launch_on_device(size_t bucket, Role role) {
    const BucketView& view = reducer_->buckets()[bucket];
    if (view.ranges.empty()) return;
    std::vector<std::pair<size_t, DeviceGrads::Values>> lacking;  // places in the bucket
    for (size_t k = 0; role == Role::own && k < view.params.size(); ++k) {
        const size_t param = view.params[k];
        if (has_grad_[param] != 0 || view.grads[k].size_bytes() == 0) continue;
        const bool may_return = shares_used() || globally_used_[param] == 0;
        lacking.emplace_back(k, may_return ? DeviceGrads::Values::kept : DeviceGrads::Values::dropped);
    }
    DeviceGrads::EventPtr written;
    on_device([&](DeviceGrads& device) { written = device.point(); });
    step_.works.push_back(
        submit([reducer = reducer_, bucket, step = synced_steps_, written, lacking = std::move(lacking)] {
            DeviceGrads& device = *reducer->device();
            const BucketView& full = reducer->buckets()[bucket];
            device.begin_bucket(bucket, written);
            for (const auto& [k, values] : lacking) device.set_aside(full.params[k], full.grads[k], values);
            reducer->reduce(bucket, step);
            device.end_bucket(bucket);
        }));
}

// What has failed on the device since the last step is known before this one begins.
void Ddp::begin_step_on_device() {
    check_device();
    on_device([this](DeviceGrads& device) { device.begin_step(buckets_.size()); });
}

// Gradients that no rank has get their old values back.
void Ddp::end_step_on_device(Role role) {
    check_device();
    on_device([&](DeviceGrads& device) {
        device.end_step([this](size_t param) { return globally_used_[param] == 0; });
        if (role == Role::own) device.keep_times();
    });
}

// By the clock of the device: `exposed` is how long the trainer's stream waits.
void Ddp::take_device_stats() {
    const DeviceGrads::StepTimes step = reducer_->device()->times(Deadline::in(comm_->options().timeout));
    auto shown = step.trainer_end;
    for (size_t b = 0; b < stats_.size(); ++b) {
        BucketStats& stats = stats_[b];
        if (stats.size_bytes == 0) continue;
        const auto& [written, start, end] = step.buckets[b];
        stats.ready = written;
        stats.start = start;
        stats.end = end;
        stats.exposed = std::max(end - shown, std::chrono::nanoseconds{0});
        shown = std::max(shown, end);
    }
    timed_ = true;
}

void Ddp::zero_memory() {
    if (reducer_->device() == nullptr) return reducer_->zero_memory();
    on_device([](DeviceGrads& device) { device.zero(); });
}

void Ddp::check_device() {
    try {
        reducer_->device()->check(*comm_);
    } catch (const Error& error) {
        failed_ = error;
        throw;
    }
}

// Peers would wait for a rank whose device fails, so that the communicator fails with it.
void Ddp::on_device(FunctionRef<void(DeviceGrads&)> body) {
    try {
        body(*reducer_->device());
    } catch (...) {
        const Error error = current_error();
        step_.works.push_back(submit([error] { throw Error(error); }));
        await_works();
    }
}

// That an operation has failed on the device is only seen by later calls, which say why.
Error Ddp::cause_of(const Error& error) const {
    DeviceGrads* const device = reducer_->device();
    if (device == nullptr || error.code() != Code::aborted || !device->has_unfinished()) return error;
    const auto first = comm_->error();
    return first ? Error(*first) : error;
}

}  // namespace tsr
