#include "parallel/pipeline/messages.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "base/attempt.hpp"
#include "base/meter.hpp"

namespace tsr::pipeline {

namespace {

// Messages that a rank may have on their way before its trainer waits. Each keeps its memory.
constexpr size_t max_messages = 32;

// Bundles of a peer that may have come before the trainer takes them, in an evaluation: a stage that is slower than the
// one before would gather the whole batch. (The order of a training step limits them.) While the trainer waits for
// anything, there is no limit, so that no two ranks wait for each other.
constexpr size_t max_ahead = 4;

// Ranks that wait for each other in a chain should not all give up at once: the one next to the late rank knows most.
// Those behind it wait a little longer.
constexpr milliseconds grace_per_stage{100};
constexpr int most_stages_of_grace = 50;

size_t index_of(Kind kind) { return static_cast<size_t>(kind); }

std::string_view name_of(Pass pass) { return pass == Pass::training ? "a training step" : "an evaluation"; }

Tensor bytes_of(std::byte* data, size_t size) { return {data, Dims{static_cast<int64_t>(size)}, DType::u8, {}}; }

}  // namespace

Messages::Messages(std::shared_ptr<Communicator> comm, std::vector<Route> routes, int microbatches,
                   uint64_t max_tensor_bytes, std::shared_ptr<Pool> pool, std::unique_ptr<DeviceLanes> lanes)
    : routes_(std::move(routes)),
      microbatches_(microbatches),
      max_tensor_bytes_(max_tensor_bytes),
      pool_(std::move(pool)),
      rank_(comm->rank()),
      comm_(std::move(comm)),
      lanes_(std::move(lanes)) {
    std::map<int, Source> sources;
    for (const Kind kind : {Kind::activation, Kind::gradient}) {
        auto& slots = slots_[index_of(kind)];
        slots.resize(routes_.size());
        for (size_t edge = 0; edge < routes_.size(); ++edge) {
            const Parcel any{kind, edge, 0};
            if (receiver_of(any) != rank_) continue;
            slots[edge].resize(static_cast<size_t>(microbatches_));
            const int sender = sender_of(any);
            if (sender == rank_) continue;
            Source& source = sources[sender];
            source.rank = sender;
            ++source.edges[index_of(kind)];
        }
    }
    for (auto& [rank, source] : sources) sources_.push_back(std::move(source));
}

Messages::~Messages() {
    if (fork_.in_child()) return;  // the progress thread is the parent's
    std::unique_lock lock(mutex_);
    while (on_lanes_ > 0) changed_.wait_for(lock, poll_slice);  // ends: what is on a lane fails at its timeout
    lock.unlock();
    comm_->leave();  // aborts what is unfinished, so that its callbacks come now
    lock.lock();
    while (in_flight_ > 0) changed_.wait_for(lock, poll_slice);  // ends: an aborted communicator finishes all its work
}

int Messages::sender_of(const Parcel& parcel) const {
    const Route& route = routes_[parcel.edge];
    return parcel.kind == Kind::activation ? route.from_rank : route.to_rank;
}

int Messages::receiver_of(const Parcel& parcel) const {
    const Route& route = routes_[parcel.edge];
    return parcel.kind == Kind::activation ? route.to_rank : route.from_rank;
}

int Messages::stage_that_takes(const Parcel& parcel) const {
    const Route& route = routes_[parcel.edge];
    return parcel.kind == Kind::activation ? route.to_stage : route.from_stage;
}

std::string Messages::describe(const Parcel& parcel) const {
    const Route& route = routes_[parcel.edge];
    return fmt::format("the {} of micro-batch {} from stage {} on rank {}", name_of(parcel.kind), parcel.microbatch,
                       parcel.kind == Kind::activation ? route.from_stage : route.to_stage, sender_of(parcel));
}

Messages::Slot& Messages::slot(const Parcel& parcel) {
    return slots_[index_of(parcel.kind)][parcel.edge][static_cast<size_t>(parcel.microbatch)];
}

// --- a pass

void Messages::begin(Pass pass, milliseconds timeout) {
    if (lanes_) [[unlikely]] {
        if (const auto failed = failure()) throw Error(*failed);
    }
    ++step_;
    pass_ = pass;
    timeout_ = timeout;
    {
        const std::lock_guard lock(mutex_);
        for (auto& edges : slots_) {
            for (auto& slots : edges) std::ranges::fill(slots, Slot{});
        }
    }
    // A receive is posted long before the trainer waits for it; the trainer's wait has the deadline.
    comm_->set_timeout(no_timeout);
    for (Source& source : sources_) {
        const size_t edges = source.edges[0] + (pass == Pass::training ? source.edges[1] : 0);
        source.bundles_left = edges * static_cast<size_t>(microbatches_);
        source.not_taken = 0;
        source.held = false;
        if (source.bundles_left > 0) receive_header(source);
    }
}

milliseconds Messages::grace_of(const Parcel& parcel) const {
    const int stage = stage_that_takes(parcel);
    const int behind = parcel.kind == Kind::activation ? stage : static_cast<int>(routes_.size()) - stage;
    return std::min(timeout_, grace_per_stage * std::clamp(behind, 0, most_stages_of_grace));
}

milliseconds Messages::longest_grace() const { return std::min(timeout_, grace_per_stage * most_stages_of_grace); }

Bundle Messages::take(const Parcel& parcel, StreamHandle stream) {
    const int stage = stage_that_takes(parcel);
    const milliseconds grace = grace_of(parcel);
    std::unique_lock lock(mutex_);
    Slot& here = slot(parcel);
    const auto what = [&] { return fmt::format("stage {} waited for {}", stage, describe(parcel)); };
    if (!wait(lock, timeout_ + grace, [&] { return here.state == Slot::State::complete; }, what)) {
        throw timed_out(what(), sender_of(parcel));
    }
    here.state = Slot::State::taken;
    const auto source = std::ranges::find(sources_, sender_of(parcel), &Source::rank);
    if (source != sources_.end()) --source->not_taken;
    Bundle bundle = std::move(here.bundle);
    const EventPtr received = std::move(here.received);
    lock.unlock();
    if (received) [[unlikely]]
        lanes_->api().wait(stream, *received);
    release_sources();
    return bundle;
}

void Messages::finish() {
    std::unique_lock lock(mutex_);
    const auto what = [&] {
        std::string text;
        for (const auto& [peer, sends] : sends_) {
            if (sends.count == 0) continue;
            text += fmt::format("{} until stage {} on rank {} had received {}", text.empty() ? "waited" : " and",
                                stage_that_takes(sends.last), peer, describe(sends.last));
        }
        return text.empty() ? "waited for the last messages" : text;
    };
    if (wait(lock, timeout_, [&] { return in_flight_ == 0; }, what)) return;
    const auto late = std::ranges::find_if(sends_, [](const auto& one) { return one.second.count > 0; });
    throw timed_out(what(), late != sends_.end() ? late->first : -1);
}

void Messages::between(milliseconds timeout, FunctionRef<void(Communicator&)> body) {
    comm_->set_timeout(timeout);
    body(*comm_);
}

// --- sending

void Messages::send(const Parcel& parcel, Bundle bundle, const EventPtr& written) {
    const int peer = receiver_of(parcel);
    if (peer == rank_) {
        const std::lock_guard lock(mutex_);
        Slot& there = slot(parcel);
        there.bundle = std::move(bundle);
        there.state = Slot::State::complete;
        return;
    }
    MessageHeader header;
    header.step = step_;
    header.pass = pass_;
    header.kind = parcel.kind;
    header.edge = static_cast<uint32_t>(parcel.edge);
    header.microbatch = static_cast<uint32_t>(parcel.microbatch);
    header.count = static_cast<uint32_t>(bundle.size());
    if (bundle.empty()) return send_tensor(peer, header, {}, written);
    for (Held& held : bundle) {
        const Tensor& tensor = held.tensor;
        header.dtype = static_cast<int32_t>(tensor.dtype);
        header.ndim = tensor.shape.ndim();
        header.shape = {};
        std::ranges::copy(tensor.shape, header.shape.begin());
        send_tensor(peer, header, std::move(held), written);
        ++header.index;
    }
}

void Messages::send_tensor(int peer, const MessageHeader& header, Held held, const EventPtr& written) {
    const Parcel parcel = parcel_of(header);
    const auto what = [&] { return fmt::format("could not send {}", describe(parcel)); };
    const size_t size = header.count == 0 ? 0 : held.tensor.size_bytes();
    const auto outgoing = std::make_shared<Outgoing>(Outgoing{header, {}});
    uint64_t number = 0;  // on the lane
    {
        std::unique_lock lock(mutex_);
        const auto ready = [&] { return sends_[peer].count < max_messages; };
        const auto full = [&] {
            return ready() ? what()
                           : fmt::format("waited until rank {} had received earlier messages, to send {}", peer,
                                         describe(parcel));
        };
        if (!wait(lock, timeout_, ready, full)) throw timed_out(full(), peer);
        sends_[peer].last = parcel;
        if (lanes_) [[unlikely]]
            number = prepare_for_lane(peer, outgoing->header, held);
    }
    if (!lanes_) outgoing->held = std::move(held);
    const auto send = [&](const Tensor& bytes, int tag, std::string_view label) {
        submit({.collective = Collective::send, .inputs = {&bytes, 1}, .peer = peer, .tag = tag, .label = label},
               [outgoing] {});
    };
    try {
        send(bytes_of(reinterpret_cast<std::byte*>(&outgoing->header), sizeof outgoing->header), header_tag, "header");
        if (outgoing->held.memory && size > 0) {
            send(bytes_of(outgoing->held.tensor.data, size), bytes_tag, name_of(header.kind));
        }
    } catch (const Error& error) {
        throw ended(what(), comm_->error().value_or(error));
    }
    if (lanes_) [[unlikely]]
        send_on_lane(parcel, number, held, written);
}

// Calls `then` when the operation is done, on the progress thread or at once.
template <class Then>
void Messages::submit(const Request& request, Then then) {
    const int peer = request.peer;
    const bool sends = request.collective == Collective::send;
    std::function<void(const std::optional<Error>&)> done =
        [this, peer, sends, then = std::move(then)](const std::optional<Error>& error) {
            if (error) {
                note(*error);
            } else {
                try {
                    then();
                } catch (...) {
                    fail(current_error());
                }
            }
            const std::lock_guard lock(mutex_);
            if (sends) --sends_[peer].count;
            --in_flight_;
            changed_.notify_all();  // under the lock: whoever waits may destroy this object then
        };
    const WorkPtr work = comm_->submit(request);
    {
        const std::lock_guard lock(mutex_);
        ++in_flight_;
        if (sends) ++sends_[peer].count;
    }
    work->on_done(std::move(done));
}

// --- receiving, on the progress thread but for the first header of a pass

bool Messages::is_far_ahead(const Source& source) const {
    if (pass_ == Pass::training || source.not_taken < max_ahead) return false;
    return awaited_ == nullptr || (*awaited_)();
}

void Messages::release_sources() {
    if (failure()) return;
    for (Source& source : sources_) {
        {
            const std::lock_guard lock(mutex_);
            if (!source.held || is_far_ahead(source)) continue;
            source.held = false;
        }
        if (source.bundles_left > 0) receive_header(source);
    }
}

void Messages::receive_header(Source& source) {
    source.header = {};
    const Tensor bytes = bytes_of(reinterpret_cast<std::byte*>(&source.header), sizeof source.header);
    submit({.collective = Collective::recv,
            .outputs = {&bytes, 1},
            .peer = source.rank,
            .tag = header_tag,
            .label = "header"},
           [this, &source] { header_came(source); });
}

void Messages::header_came(Source& source) {
    check_header(source);
    if (lanes_) [[unlikely]]
        release_sent(source.rank, source.header.received);
    if (source.header.count == 0) return tensor_came(source);
    Held& arriving = source.arriving;
    arriving.tensor = checked_tensor(source);
    const size_t size = arriving.tensor.size_bytes();
    arriving.memory = pool_->take(size);
    arriving.tensor.data = arriving.memory.get();
    if (lanes_) [[unlikely]]
        receive_on_lane(source);
    if (size == 0 || lanes_) return tensor_came(source);
    const Tensor bytes = bytes_of(arriving.tensor.data, size);
    submit({.collective = Collective::recv,
            .outputs = {&bytes, 1},
            .peer = source.rank,
            .tag = bytes_tag,
            .label = name_of(source.header.kind)},
           [this, &source] { tensor_came(source); });
}

// A tensor, or a bundle without any.
void Messages::tensor_came(Source& source) {
    const MessageHeader& header = source.header;
    {
        const std::lock_guard lock(mutex_);
        Slot& here = slot(parcel_of(header));
        here.count = header.count;
        if (header.count > 0) here.bundle.push_back(std::exchange(source.arriving, {}));
        here.state = here.bundle.size() == header.count ? Slot::State::complete : Slot::State::partial;
        if (here.state == Slot::State::complete) {
            --source.bundles_left;
            ++source.not_taken;
            changed_.notify_all();
        }
        source.held = is_far_ahead(source);
        if (source.held) return;
    }
    if (source.bundles_left > 0) receive_header(source);
}

void Messages::check_header(const Source& source) {
    const MessageHeader& header = source.header;
    const auto refuse = [&](Code code, const std::string& why) {
        throw Error(code, fmt::format("rank {} sent a message that {}", source.rank, why)).with_peer(source.rank);
    };
    if (header.magic != MessageHeader::current_magic) {
        refuse(Code::corrupt, fmt::format("does not begin as one of a pipeline (magic {:#x})", header.magic));
    }
    if (header.kind != Kind::activation && header.kind != Kind::gradient) {
        refuse(Code::corrupt, fmt::format("has the unknown kind {}", static_cast<int>(header.kind)));
    }
    if (header.edge >= routes_.size() || header.microbatch >= static_cast<uint32_t>(microbatches_)) {
        refuse(Code::corrupt, fmt::format("is for micro-batch {} and edge {}; there are {} micro-batches and {} edges",
                                          header.microbatch, header.edge, microbatches_, routes_.size()));
    }
    const Parcel parcel = parcel_of(header);
    const std::string what = describe(parcel);
    if (sender_of(parcel) != source.rank || receiver_of(parcel) != rank_) {
        refuse(Code::corrupt, fmt::format("claims to be {}, which goes from rank {} to rank {}, not to rank {}", what,
                                          sender_of(parcel), receiver_of(parcel), rank_));
    }
    if (header.step != step_ || header.pass != pass_) {
        refuse(
            Code::mismatch,
            fmt::format("is {} of pass {}, {}; here it is pass {}, {}: call step and eval in the same order on every "
                        "rank",
                        what, header.step, name_of(header.pass), step_, name_of(pass_)));
    }
    if (header.kind == Kind::gradient && pass_ == Pass::evaluation) {
        refuse(Code::mismatch, fmt::format("is {}; an evaluation has no gradients", what));
    }
    if (header.count > max_bundle_tensors) {
        refuse(Code::corrupt, fmt::format("claims that {} has {} tensors; at most {} are allowed", what, header.count,
                                          max_bundle_tensors));
    }
    const std::lock_guard lock(mutex_);
    if (header.received > 0 && header.received > sends_[source.rank].launched) {
        refuse(Code::corrupt, fmt::format("claims that {} tensors have come to it on a device; {} were sent",
                                          header.received, sends_[source.rank].launched));
    }
    const Slot& here = slot(parcel);
    if (here.state == Slot::State::complete || here.state == Slot::State::taken) {
        refuse(Code::mismatch, fmt::format("is {}, which has come before", what));
    }
    const bool in_order =
        header.index == here.bundle.size() &&
        (here.state == Slot::State::awaited ? header.index < std::max(header.count, 1U) : header.count == here.count);
    if (!in_order) {
        refuse(Code::corrupt,
               fmt::format("is tensor {} of {} of {}; expected was tensor {}{}", header.index, header.count, what,
                           here.bundle.size(), here.count > 0 ? fmt::format(" of {}", here.count) : ""));
    }
}

Tensor Messages::checked_tensor(const Source& source) const {
    const MessageHeader& header = source.header;
    const auto refuse = [&](const std::string& why) {
        throw Error(Code::corrupt, fmt::format("rank {} sent tensor {} of {} with {}", source.rank, header.index,
                                               describe(parcel_of(header)), why))
            .with_peer(source.rank);
    };
    Tensor tensor;
    tensor.dtype = static_cast<DType>(header.dtype);
    if (!is_known(tensor.dtype)) refuse(fmt::format("the unknown dtype {}", header.dtype));
    if (header.ndim < 0 || header.ndim > max_ndim) {
        refuse(fmt::format("{} dimensions; 0 to {} are supported", header.ndim, max_ndim));
    }
    tensor.shape = Dims(std::span(header.shape).first(static_cast<size_t>(header.ndim)));
    try {
        check_shape(tensor.shape, tensor.dtype, "the tensor");
    } catch (const Error& error) {
        refuse(fmt::format("an impossible shape: {}", error.what()));
    }
    if (tensor.size_bytes() > max_tensor_bytes_) {
        refuse(fmt::format("{} bytes; max_message_bytes is {}", tensor.size_bytes(), max_tensor_bytes_));
    }
    return tensor;
}

// --- waiting and failing

bool Messages::wait(std::unique_lock<std::mutex>& lock, milliseconds time, FunctionRef<bool()> ready,
                    FunctionRef<std::string()> what) {
    if (!failure_ && ready()) return true;
    const ExposedWait exposed;
    bool result = false;
    awaited_ = &ready;
    lock.unlock();
    const auto failed = attempt([&] {
        release_sources();
        lock.lock();
        result = wait_until_ready(lock, Deadline::in(time), ready, what);
    });
    if (!lock.owns_lock()) lock.lock();
    awaited_ = nullptr;
    if (failed) throw Error(*failed);
    return result;
}

bool Messages::wait_until_ready(std::unique_lock<std::mutex>& lock, Deadline deadline, FunctionRef<bool()> ready,
                                FunctionRef<std::string()> what) {
    while (true) {
        if (failure_) throw ended(what(), *failure_);
        if (ready()) return true;
        if (deadline.expired()) return false;
        changed_.wait_for(lock, deadline.slice());
        lock.unlock();
        try {
            poll_interrupt();
        } catch (const Error& error) {
            throw Error(error.code(), fmt::format("{}: {}", what(), error.what()));
        }
        lock.lock();
    }
}

Error Messages::ended(const std::string& what, const Error& cause) {
    return Error(cause.code(), fmt::format("{}: {}", what, cause.what()))
        .with_peer(cause.record()->peer)
        .caused_by(cause);
}

Error Messages::timed_out(const std::string& what, int peer) const {
    return Error(Code::timeout, fmt::format("{}, in vain for {} s; check the log of rank {}, or raise the timeout of "
                                            "the communicator",
                                            what, static_cast<double>(timeout_.count()) / 1000, peer))
        .with_peer(peer);
}

// A message has failed. The communicator knows the first error, which may be another message's.
void Messages::note(const Error& error) {
    const Error cause = comm_->error().value_or(error);
    {
        const std::lock_guard lock(mutex_);
        if (!failure_) failure_ = failing_.value_or(cause);
        changed_.notify_all();
    }
    if (lanes_) lanes_->abort(cause.what());
}

// Tells the peers before this rank's trainer, which may destroy this object and so leave the communicator: they would
// learn of that instead. What is on lanes fails meanwhile.
void Messages::fail(const Error& why) {
    fail_first(comm_->error().value_or(why));  // a peer's, if it is known by now
}

void Messages::fail_first(const Error& cause) {
    {
        const std::lock_guard lock(mutex_);
        if (failure_ || failing_) return;
        failing_ = cause;
    }
    comm_->abort(cause.what());
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = cause;
    changed_.notify_all();
}

std::optional<Error> Messages::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

}  // namespace tsr::pipeline
