// A Group's part for tensors on a device.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "comm/backend.hpp"
#include "comm/device_transport.hpp"
#include "comm/fingerprint.hpp"
#include "comm/group.hpp"
#include "comm/plan.hpp"

namespace tsr {

namespace {

// What a rank has for the others before they connect.
struct Ready {
    int32_t failed = 0;       // the code of its error,
    uint32_t why_length = 0;  // and the length of the error's text in bytes
    NcclId id{};              // of rank 0
};

}  // namespace

bool Group::has_devices() const { return backends_of(options_.backend).nccl; }

void Group::open_device(int place) {
    std::vector<Ready> own(1);
    std::string why;
    Device device{DeviceType::cuda, options_.device};
    try {
        const int count = cuda_device_count();
        if (device.index < 0) device.index = place % count;
        static_cast<void>(device_api(device));
        static_cast<void>(nccl_facts());
        if (rank_ == 0) own[0].id = make_nccl_id();
    } catch (...) {
        const Error error = current_error();
        why = error.what();
        own[0].failed = static_cast<int32_t>(error.code());
        own[0].why_length = static_cast<uint32_t>(why.size());
    }
    std::vector<Ready> all(static_cast<size_t>(world_size_));
    const auto bytes_of = [](std::vector<Ready>& list) {
        return tensor_of(std::span(reinterpret_cast<uint8_t*>(list.data()), list.size() * sizeof(Ready)), DType::u8);
    };
    const Tensor input = bytes_of(own);
    const Tensor output = bytes_of(all);
    run({.collective = Collective::all_gather, .inputs = {&input, 1}, .outputs = {&output, 1}, .label = "devices"});
    const auto bad = std::ranges::find_if(all, [](const Ready& one) { return one.failed != 0; });
    if (bad != all.end()) {
        throw_refusal(*this, "devices", static_cast<int>(bad - all.begin()), static_cast<Code>(bad->failed),
                      bad->why_length, why);
    }
    const auto give_up_with_peers = [this] {
        if (const auto lost = transport_->peer_error()) throw Error(*lost);
    };
    try {
        use(make_nccl_transport(all[0].id, rank_, world_size_, device, Deadline::in(timeout()), give_up_with_peers));
    } catch (...) {
        const Error error = of_launcher(current_error().with_rank(rank_), launcher_ranks_);
        poison(error);
        throw error;
    }
}

void Group::use(std::unique_ptr<DeviceTransport> transport) {
    own_device_ = transport->device();
    device_ = std::make_unique<DeviceQueue>(
        std::move(transport),
        DeviceQueue::Callbacks{
            .peer_error = [this] { return transport_->peer_error(); },
            .absent =
                [this](const DeviceQueue::Launch& launch) {
                    return transport_->absent_from(launch.operation, launch.sequence);
                },
            .named =
                [this](const Error& error, const DeviceQueue::Launch& launch) {
                    Request request;
                    request.collective = launch.operation.collective;
                    return named(error, request, launch.sequence);
                },
            .failed = [this](const Error& error) { poison(error); },
            .ended = [this](const DeviceQueue::Launch& launch, bool well) { flight_.ended(launch.ticket, well); }});
}

bool Group::all_agree(bool agrees, milliseconds timeout) {
    std::array<uint8_t, 1> least{agrees ? uint8_t{1} : uint8_t{0}};
    const Tensor vote = tensor_of(std::span<uint8_t>(least), DType::u8);
    const Request request{
        .collective = Collective::all_reduce, .outputs = {&vote, 1}, .op = ReduceOp::min, .label = "devices"};
    const Call once = enter();
    if (!runs_inline()) {
        await_queue();
        throw_if_unusable();
    }
    const Operation operation = operation_of(request);
    const uint64_t sequence = ++collectives_;
    run_collective(request, operation, sequence, flight_.started(operation, sequence), timeout);
    return least[0] != 0;
}

// NCCL splits the communicator that is there, if every rank can take part: its operations are over, and the rank's device
// stays the same. Otherwise each group connects for itself. A rank may take all of `limit` to make its group first.
void Group::connect_parts(int color, const HostGroup& part, const std::optional<Error>& failure, milliseconds limit) {
    const bool has_part = part.group && part.group->has_devices();
    const bool same_device = !has_part || part.group->options_.device == device_->device().index;
    const bool ready = all_agree(!failure && same_device && device_->comes_to_rest(), timeout() + limit);
    if (failure) throw Error(*failure);
    if (!ready) {
        if (has_part) part.group->open_device(part.place);
        return;
    }
    const auto give_up_with_peers = [&] {
        if (const auto lost = transport_->peer_error()) throw Error(*lost);
        if (!part.group) return;
        if (const auto lost = part.group->transport_->peer_error()) throw Error(*lost);
    };
    try {
        DeviceTransport::Part own;
        if (has_part) own = {color, part.group->rank_, part.group->world_size_};
        auto transport = device_->split(own, Deadline::in(limit), give_up_with_peers);
        if (has_part) part.group->use(std::move(transport));
    } catch (...) {
        const Error error = of_launcher(current_error().with_rank(rank_), launcher_ranks_);
        poison(error);
        if (part.group) part.group->poison(error);
        throw error;
    }
}

void Group::check_memory(const Request& request) {
    device_->require(request);
    on_device(request.collective, [&](DeviceApi& api) {
        api.check_stream(request.stream);
        const auto check_all = [&](std::span<const Tensor> list, const char* what) {
            for (size_t i = 0; i < list.size(); ++i) {
                if (list[i].numel() == 0) continue;
                try {
                    api.check_memory(list[i].data);
                } catch (const Error& error) {
                    if (error.code() != Code::invalid_argument) throw;
                    throw Error(Code::invalid_argument,
                                fmt::format("{}: {}[{}] {}", name_of(request.collective), what, i, error.what()));
                }
            }
        };
        check_all(request.inputs, "input");
        check_all(request.outputs, "output");
    });
}

// A device that fails ends the communicator: peers would wait for this rank.
void Group::on_device(Collective collective, FunctionRef<void(DeviceApi&)> body) {
    try {
        body(device_->api());
    } catch (const Error& error) {
        if (error.code() != Code::cuda) throw;
        Request request;
        request.collective = collective;
        const Error told = named(error, request, -1);
        poison(told);
        throw told;
    }
}

// What a task has of a request on a device. The work of the task ends when it is launched.
struct Group::DeviceRequest : OwnedRequest {
    explicit DeviceRequest(const Request& request) : OwnedRequest(request) {}

    std::shared_ptr<DeviceEvent> after;  // of an asynchronous one: what it comes after
    WorkPtr work;                        // ends with it; may be null
};

void Group::launch(const Request& request, const Task& task, const DeviceEvent* after, const WorkPtr& work) {
    const uint64_t sequence = is_point_to_point(request.collective) ? ++transfers_ : ++collectives_;
    flight_.started(task.ticket, sequence);
    device_->launch(request, {task.operation, sequence, task.ticket, task.timeout, work, {}}, after);
    add_to(meter().bytes, task.operation.size_bytes());
}

void Group::launch(const Task& task) {
    const auto& request = static_cast<const DeviceRequest&>(*task.request);
    launch(request.view(), task, request.after.get(), request.work);
}

void Group::fail_on_device(const Task& task, const Error& error) {
    const auto& request = static_cast<const DeviceRequest&>(*task.request);
    if (request.work) request.work->finish(error);
}

WorkPtr Group::run_tracked(const Request& request) {
    if (!validate(request, rank_, world_size_, own_device_)) return Communicator::run_tracked(request);
    const Call once = enter();
    auto work = std::make_shared<Work>();
    run_on_device(request, work);
    return work;
}

WorkPtr Group::track(void* stream, std::string_view label, std::function<void()> verify) {
    if (!device_) return Communicator::track(stream, label, std::move(verify));
    const Call once = enter();
    if (!runs_inline()) {  // the progress thread may be launching
        await_queue();
        throw_if_unusable();
    }
    const Operation operation = computation_of(label);
    const uint64_t ticket = flight_.started(operation, 0);
    auto work = std::make_shared<Work>();
    device_->launch({.collective = Collective::compute, .stream = stream},
                    {operation, 0, ticket, timeout(), work, std::move(verify)});
    return work;
}

void Group::run_on_device(const Request& request, const WorkPtr& work) {
    check_memory(request);
    const bool now = runs_inline();
    Task task;
    task.operation = operation_of(request);
    task.ticket = flight_.queued(task.operation);
    task.timeout = timeout();
    if (now) return launch(request, task, nullptr, work);
    const auto owned = std::make_shared<DeviceRequest>(request);
    owned->work = work;
    task.request = owned;
    task.work = std::make_shared<Work>();
    enqueue(task);
    await(task);
}

// Launches at once if nothing is queued; else in the order of the queue, as on every rank.
WorkPtr Group::submit_to_device(const Request& request) {
    check_memory(request);
    std::shared_ptr<DeviceEvent> after;
    on_device(request.collective, [&](DeviceApi& api) { after = api.record(request.stream); });
    auto work = std::make_shared<Work>();
    Task task;
    task.operation = operation_of(request);
    task.ticket = flight_.queued(task.operation);
    task.timeout = timeout();
    if (unfinished_.load(std::memory_order_acquire) == 0) {
        try {
            launch(request, task, after.get(), work);
        } catch (...) {
            work->finish(current_error());
        }
        return work;
    }
    const auto owned = std::make_shared<DeviceRequest>(request);
    owned->after = std::move(after);
    owned->work = work;
    task.request = owned;
    task.work = std::make_shared<Work>();
    enqueue(std::move(task));
    return work;
}

class Group::PreparedOnDevice final : public Plan {
   public:
    PreparedOnDevice(std::shared_ptr<Group> group, const Request& request)
        : group_(std::move(group)), request_(request) {}

    void run() override { group_->run(request_.view()); }

    void start() override {
        const WorkPtr last = launched();
        if (last && !last->done()) {
            throw Error(
                Code::invalid_state,
                fmt::format("rank {}: a planned {} was launched before its previous launch finished; wait for it "
                            "first",
                            group_->rank_, name_of(request_.view().collective)))
                .with_rank(group_->rank_);
        }
        WorkPtr work = group_->submit(request_.view());
        const std::lock_guard lock(mutex_);
        launched_ = std::move(work);
    }

    void wait(Deadline deadline) const override {
        if (const WorkPtr last = launched()) last->wait(deadline);
    }

   private:
    [[nodiscard]] WorkPtr launched() const {
        const std::lock_guard lock(mutex_);
        return launched_;
    }

    const std::shared_ptr<Group> group_;
    const OwnedRequest request_;
    mutable std::mutex mutex_;
    WorkPtr launched_;  // last; null before the first start()
};

std::shared_ptr<Plan> Group::prepare_on_device(const Request& request) {
    check_memory(request);
    return std::make_shared<PreparedOnDevice>(shared_from_this(), request);
}

}  // namespace tsr
