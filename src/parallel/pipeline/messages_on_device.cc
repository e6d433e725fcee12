// What Messages does for tensors on a device, where whoever waits for one is a stream.
#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/attempt.hpp"
#include "parallel/pipeline/messages.hpp"

namespace tsr::pipeline {

// Before the peer can know of the message. 0: it has no bytes.
uint64_t Messages::prepare_for_lane(int peer, MessageHeader& header, const Held& held) {
    const auto source = std::ranges::find(sources_, peer, &Source::rank);
    if (source != sources_.end()) header.received = source->launched;
    if (header.count == 0 || held.tensor.size_bytes() == 0) return 0;
    Sends& sends = sends_[peer];
    ++sends.count;
    sends.on_lane.emplace_back(++sends.launched, held);
    return sends.launched;
}

void Messages::send_on_lane(const Parcel& parcel, uint64_t number, const Held& held, const EventPtr& written) {
    if (number == 0) {  // nothing to move, but the memory may have been used until then
        if (held.memory) pool_->add_use(held.memory.get(), written);
        return;
    }
    const int peer = receiver_of(parcel);
    const StreamHandle stream = lanes_->stream({rank_, peer});
    lanes_->api().wait(stream, *written);
    move_on_lane(parcel, {rank_, peer}, held.tensor, {written}, [this, peer, number] { release_sent(peer, number); });
    pool_->add_use(held.memory.get(), lanes_->api().record(stream));
}

void Messages::receive_on_lane(Source& source) {
    const Parcel parcel = parcel_of(source.header);
    const Direction direction{source.rank, rank_};
    const StreamHandle stream = lanes_->stream(direction);
    Held& arriving = source.arriving;
    arriving.tensor.device = lanes_->device();
    auto before = pool_->former_uses(arriving.memory.get());
    for (const EventPtr& use : before) lanes_->api().wait(stream, *use);
    const bool has_bytes = arriving.tensor.size_bytes() > 0;
    if (has_bytes) move_on_lane(parcel, direction, arriving.tensor, std::move(before), [] {});
    EventPtr received = lanes_->api().record(stream);
    const std::lock_guard lock(mutex_);
    slot(parcel).received = std::move(received);
    if (has_bytes) ++source.launched;
}

// Calls `then` when the tensor has been moved, on a thread of the lane or at once. Its stream waits for the events `before`.
template <class Then>
void Messages::move_on_lane(const Parcel& parcel, Direction direction, const Tensor& tensor,
                            std::vector<EventPtr> before, Then then) {
    const bool sends = direction.from == rank_;
    const Route& route = routes_[parcel.edge];
    const std::string label = fmt::format("{} {}, stage {}", name_of(parcel.kind), parcel.microbatch,
                                          parcel.kind == Kind::activation ? route.from_stage : route.to_stage);
    // The receiver knows more of a late message than the sender.
    const milliseconds grace = sends ? longest_grace() : grace_of(parcel);
    WorkPtr work;
    try {
        work = lanes_->move(direction, tensor, timeout_ + grace, label);
    } catch (const Error& error) {
        const Error first = is_of_another(error) ? Error(error.record()->cause) : error;
        // Peers answer to the end of a lane, so that only what is not an abort says who began.
        const bool is_first = first.code() != Code::aborted;
        throw failed_on_lane(parcel, before, is_first ? first : failure().value_or(comm_->error().value_or(first)));
    }
    {
        const std::lock_guard lock(mutex_);
        ++on_lanes_;
    }
    work->on_done([this, parcel, before = std::move(before), then](const std::optional<Error>& error) {
        if (error) {
            const Error why = failed_on_lane(parcel, before, *error);
            if (is_first(*error)) {
                fail_first(why);
            } else if (!is_of_another(*error)) {
                fail(why);
            }
        } else {
            then();
        }
        const std::lock_guard lock(mutex_);
        --on_lanes_;
        changed_.notify_all();  // under the lock, as above
    });
}

// Of this rank's device or NCCL: nobody else's failure is why. Peers may have answered to it by now.
bool Messages::is_first(const Error& error) { return error.code() == Code::cuda || error.code() == Code::nccl; }

// What has failed first on this rank's lane is about to say so itself.
bool Messages::is_of_another(const Error& error) const {
    const auto& cause = error.record()->cause;
    return error.code() == Code::aborted && cause && cause->rank == rank_ && cause->code != Code::aborted;
}

// The peer has launched the receives of that many tensors.
void Messages::release_sent(int peer, uint64_t received) {
    const std::lock_guard lock(mutex_);
    Sends& sends = sends_[peer];
    while (!sends.on_lane.empty() && sends.on_lane.front().first <= received) {
        sends.on_lane.pop_front();
        --sends.count;
    }
    changed_.notify_all();
}

Error Messages::failed_on_lane(const Parcel& parcel, const std::vector<EventPtr>& before, const Error& error) const {
    const bool sends = sender_of(parcel) == rank_;
    std::string what = sends ? fmt::format("could not send {}", describe(parcel))
                             : fmt::format("stage {} waited for {}", stage_that_takes(parcel), describe(parcel));
    int peer = error.record()->peer;
    if (error.code() == Code::timeout && peer < 0) {
        bool is_own = false;
        static_cast<void>(attempt(
            [&] { is_own = std::ranges::any_of(before, [](const EventPtr& event) { return !event->done(); }); }));
        if (is_own) {
            what += fmt::format(", but the stream of rank {} has not come that far", rank_);
        } else {
            peer = sends ? receiver_of(parcel) : sender_of(parcel);
        }
    }
    return Error(error.code(), fmt::format("{}: {}", what, error.what())).with_peer(peer).caused_by(error);
}

}  // namespace tsr::pipeline
