#include "parallel/ddp/device_grads.hpp"

#include <algorithm>

#include "base/page_size.hpp"
#include "base/round_up.hpp"

namespace tsr {

namespace {

constexpr size_t smallest_piece = size_t{1} << 20;
constexpr size_t aside_alignment = 256;

bool ended_well(const WorkPtr& work) { return work->done() && !work->error(); }

}  // namespace

DeviceGrads::DeviceGrads(Device device, size_t size)
    : api_(device_api(device)),
      memory_(api_.allocate(std::max(size, page_size))),
      size_(size),
      own_(api_.new_stream()) {}

void DeviceGrads::set_trainer(StreamHandle stream) {
    api_.check_stream(stream);
    if (settled_) api_.wait(stream, *settled_);
    trainer_ = stream;
}

void DeviceGrads::zero() {
    api_.zero(memory(), size_, trainer_);
    settled_ = api_.record(trainer_);
}

DeviceGrads::EventPtr DeviceGrads::point() const { return api_.record_time(trainer_); }

void DeviceGrads::begin_step(size_t buckets) { step_ = {point(), std::vector<BucketMarks>(buckets), nullptr, nullptr}; }

void DeviceGrads::begin_bucket(size_t bucket, EventPtr written) {
    api_.wait(own(), *written);
    step_.buckets[bucket] = {std::move(written), api_.record_time(own()), nullptr};
}

void DeviceGrads::end_bucket(size_t bucket) { step_.buckets[bucket].end = api_.record_time(own()); }

std::byte* DeviceGrads::room_aside(size_t size) {
    size = round_up(size, aside_alignment);
    for (; piece_ < pieces_.size(); ++piece_, used_ = 0) {
        auto& [memory, length] = pieces_[piece_];
        if (used_ + size <= length) return memory.get() + std::exchange(used_, used_ + size);
    }
    const size_t length = std::max(size, smallest_piece);
    pieces_.emplace_back(api_.allocate(length), length);
    used_ = size;
    return pieces_.back().first.get();
}

void DeviceGrads::set_aside(size_t param, const Tensor& grad, Values values) {
    const size_t size = grad.size_bytes();
    if (values == Values::kept) {
        std::byte* const room = room_aside(size);
        api_.copy(room, grad.data, size, own());
        aside_.push_back({param, grad, room});
    }
    api_.zero(grad.data, size, own());
}

void DeviceGrads::convert(std::span<const ConvertedRange> ranges, DType from, DType to, double before,
                          double after) const {
    convert_on(api_, ranges, from, to, own(), before, after);
}

void DeviceGrads::divide(std::span<const Tensor> tensors, double divisor) const {
    divide_on(api_, tensors, divisor, own());
}

void DeviceGrads::run_on(StreamHandle stream, Communicator& comm, Request& request) {
    request.stream = stream;
    WorkPtr work = comm.run_tracked(request);
    const std::lock_guard lock(mutex_);
    std::erase_if(works_, ended_well);
    works_.push_back(std::move(work));
}

void DeviceGrads::run(Communicator& comm, Request request) { run_on(own(), comm, request); }

void DeviceGrads::broadcast(Communicator& comm, Request request) {
    run_on(trainer_, comm, request);
    settled_ = api_.record(trainer_);
}

void DeviceGrads::end_step(FunctionRef<bool(size_t param)> is_wanted) {
    for (const Aside& one : aside_) {
        if (is_wanted(one.param)) api_.copy(one.grad.data, one.values, one.grad.size_bytes(), own());
    }
    aside_.clear();
    piece_ = used_ = 0;
    settled_ = step_.end = api_.record(own());
    step_.trainer_end = point();
    api_.wait(trainer_, *settled_);
}

DeviceGrads::StepTimes DeviceGrads::times(Deadline deadline) const {
    timed_.end->wait(deadline);
    timed_.trainer_end->wait(deadline);
    const auto since_begin = [this](const EventPtr& event) {
        return std::max(api_.elapsed(*timed_.begin, *event), std::chrono::nanoseconds{0});
    };
    StepTimes times{std::vector<Times>(timed_.buckets.size()), since_begin(timed_.trainer_end)};
    for (size_t b = 0; b < times.buckets.size(); ++b) {
        const auto& [written, start, end] = timed_.buckets[b];
        if (end) times.buckets[b] = {since_begin(written), since_begin(start), since_begin(end)};
    }
    return times;
}

void DeviceGrads::await(const Communicator& comm) {
    const auto deadline = Deadline::in(comm.options().timeout + after_timeout);
    std::vector<WorkPtr> works;
    {
        const std::lock_guard lock(mutex_);
        works = works_;
    }
    for (const WorkPtr& work : works) {
        try {
            work->wait(deadline);
        } catch (const Error& error) {
            if (error.code() != Code::interrupted) check(comm);
            throw;
        }
    }
    if (settled_) settled_->wait(deadline);
}

void DeviceGrads::check(const Communicator& comm) {
    const std::lock_guard lock(mutex_);
    for (const WorkPtr& work : works_) {
        const auto error = work->done() ? work->error() : std::nullopt;
        if (!error) continue;
        // What failed first, which may be another operation of this model.
        throw Error(comm.error().value_or(*error));
    }
    std::erase_if(works_, ended_well);
}

bool DeviceGrads::has_unfinished() {
    const std::lock_guard lock(mutex_);
    std::erase_if(works_, ended_well);
    return !works_.empty();
}

}  // namespace tsr
