#include "comm/hierarchical/hierarchical_transport.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace tsr {

std::unique_ptr<Transport> make_hierarchical_transport(Bootstrap bootstrap) {
    return std::make_unique<hierarchical::HierarchicalTransport>(std::move(bootstrap));
}

namespace hierarchical {

namespace {

// When one rank is late, ranks that wait for it indirectly reach their deadlines at the same instant as those that wait
// for it directly. They give the latter this long to report, so that all name the late rank; twice as long for a rank
// of the own host, which may itself be waiting for another host.
constexpr milliseconds hearsay_time{1000};
constexpr milliseconds look_pause{50};  // between two checks of the path not waited on
constexpr milliseconds mixed_turn{1};   // for messages on both ways at once
constexpr int32_t internal_tag = -1;    // of messages that are a step of a collective: no program's

// A buffer of this host's ranks, numbered as in the communicator.
class HostBuffer final : public Buffer {
   public:
    HostBuffer(std::shared_ptr<Buffer> buffer, std::vector<int> ranks)
        : buffer_(std::move(buffer)), ranks_(std::move(ranks)) {}

    [[nodiscard]] std::byte* data() const override { return buffer_->data(); }
    [[nodiscard]] size_t size() const override { return buffer_->size(); }
    [[nodiscard]] std::byte* of_rank(int rank) const override {
        const auto here = std::ranges::find(ranks_, rank);
        return here != ranks_.end() ? buffer_->of_rank(static_cast<int>(here - ranks_.begin())) : nullptr;
    }

   private:
    std::shared_ptr<Buffer> buffer_;
    std::vector<int> ranks_;
};

std::vector<Participant> hosts_of(const std::vector<Peer>& peers) {
    std::vector<Participant> hosts;
    for (const Peer& peer : peers) {
        const auto host = std::ranges::find_if(
            hosts, [&](const Participant& h) { return peers[static_cast<size_t>(h.rank)].same_host(peer); });
        if (host == hosts.end()) {
            hosts.push_back({peer.rank, {peer.rank}});
        } else {
            host->speaks_for.push_back(peer.rank);
        }
    }
    return hosts;
}

}  // namespace

// --- making it

HierarchicalTransport::HierarchicalTransport(Bootstrap bootstrap)
    : rank_(bootstrap.rank), host_of_(bootstrap.peers.size()), hosts_(hosts_of(bootstrap.peers)) {
    for (size_t at = 0; at < hosts_.size(); ++at) {
        for (const int rank : host(at)) host_of_[static_cast<size_t>(rank)] = at;
    }
    own_host_ = host_of_[static_cast<size_t>(rank_)];
    wide_ = std::make_unique<GlooTransport>(
        Bootstrap{rank_, bootstrap.peers, Endpoint(), bootstrap.store, bootstrap.options, bootstrap.deadline});
    try {
        std::vector<Peer> neighbours;
        for (const int rank : own_host()) neighbours.push_back(bootstrap.peers[static_cast<size_t>(rank)]);
        const auto place = static_cast<int>(std::ranges::find(own_host(), rank_) - own_host().begin());
        const Deadline deadline = bootstrap.deadline;
        local_ = std::make_unique<shm::ShmTransport>(Bootstrap{
            place, std::move(neighbours), std::move(bootstrap.endpoint), bootstrap.store, bootstrap.options, deadline});
        wide_->watch_too([this](const std::string& headline) {
            using Missing = shm::ShmTransport::Missing;
            local_->look(headline, in_collective_ ? Missing::is_lost : Missing::may_be);
        });
        local_->watch_too([this](const std::string& headline) { wide_->look(headline); });
        chunks_ = local_->allocate(GlooTransport::chunks_in_flight * max_chunk_bytes, 0, deadline.remaining());
        // All hosts have their memory once this is through.
        Request request;
        request.label = "create";
        run(request, operation_of(request), 0, deadline.remaining());
    } catch (...) {
        wide_->abort(current_error());
        throw;
    }
}

bool HierarchicalTransport::is_contiguous() const {
    return own_host().back() - own_host().front() + 1 == static_cast<int>(own_host().size());
}

// --- collectives

void HierarchicalTransport::run(const Request& request, const Operation& operation, uint64_t sequence,
                                milliseconds timeout) {
    whole(sequence, [&] { dispatch({request, operation, sequence, timeout}); });
}

// Between the first and the last step of a collective no rank of this host may be missing.
void HierarchicalTransport::whole(uint64_t sequence, const std::function<void()>& collective) {
    in_collective_ = true;
    try {
        collective();
    } catch (...) {
        in_collective_ = false;
        const Error error = current_error();
        throw Error(told_of_another(error, sequence).value_or(error));
    }
    in_collective_ = false;
}

void HierarchicalTransport::dispatch(const Call& call) {
    switch (call.request.collective) {
        case Collective::barrier:
        case Collective::finalize: return enter(call);
        case Collective::all_reduce: return all_reduce(call);
        case Collective::broadcast: return broadcast(call);
        case Collective::reduce: return reduce(call);
        case Collective::reduce_scatter: return reduce_scatter(call);
        case Collective::all_gather: return all_gather(call);
        case Collective::all_gather_v: return all_gather_v(call);
        case Collective::gather: return gather(call);
        case Collective::scatter: return scatter(call);
        case Collective::all_to_all: return all_to_all(call);
        case Collective::send:
        case Collective::recv:
        case Collective::allocate:
        case Collective::compute: break;
    }
    throw Error(Code::internal, "not a collective");
}

void HierarchicalTransport::local(const Call& call, const Request& step) {
    local_->run(step, call.operation, call.sequence, call.timeout);
}

void HierarchicalTransport::local_message(const Call& call, Collective direction, int peer, const Tensor& tensor) {
    Request step;
    step.collective = direction;
    (direction == Collective::send ? step.inputs : step.outputs) = std::span(&tensor, 1);
    step.peer = peer;
    step.tag = internal_tag;
    const auto transfer = local_->start(step, call.sequence, Deadline::in(call.timeout));
    Transfer* const waiting[] = {transfer.get()};
    const std::atomic<bool> woken{false};
    while (true) {
        const auto progress = transfer->advance();
        if (progress == Transfer::Progress::done) return;
        if (progress == Transfer::Progress::stuck) local_->wait(waiting, woken);
    }
}

GlooTransport::Call HierarchicalTransport::among_leaders(const Call& call) const {
    return GlooTransport::call_of(call.request, call.operation, call.sequence, call.timeout, hosts_,
                                  static_cast<int>(own_host_));
}

GlooTransport::Call HierarchicalTransport::among_all(const Call& call) const {
    return GlooTransport::call_of(call.request, call.operation, call.sequence, call.timeout, wide_->everybody(), rank_);
}

void HierarchicalTransport::enter(const Call& call) {
    local_barrier(call);
    if (is_leader()) {
        auto between = among_leaders(call);
        wide_->enter(between, {});
    }
    local_barrier(call);
}

std::shared_ptr<Buffer> HierarchicalTransport::allocate(size_t size, uint64_t sequence, milliseconds timeout) {
    const Request request;
    const Operation operation = allocation_of(size);
    const Call call{request, operation, sequence, timeout};
    std::shared_ptr<Buffer> buffer;
    std::optional<Error> failure;
    int32_t lacking = -1;  // a rank that has no memory for it
    whole(sequence, [&] {
        enter(call);
        try {
            buffer = local_->allocate(size, sequence, timeout);
        } catch (const Error& error) {
            if (error.code() != Code::no_memory) throw;
            failure = error;
            lacking = error.record()->peer;
        }
        // All hosts learn whether all have it.
        if (is_leader()) {
            auto between = among_leaders(call);
            wide_->enter(between, std::as_bytes(std::span(&lacking, 1)));
            for (int at = 0; at < between.size() && lacking < 0; ++at) {
                if (at != between.place) std::memcpy(&lacking, wide_->payload_of(between, at), sizeof lacking);
            }
        }
        const Tensor told = tensor_of(std::span(&lacking, 1), DType::i32);
        local(call, {.collective = Collective::broadcast, .outputs = {&told, 1}, .peer = leader()});
    });
    if (failure) throw Error(*failure);
    if (lacking < 0) return std::make_shared<HostBuffer>(std::move(buffer), own_host());
    throw Error(Code::no_memory,
                fmt::format("rank {}: cannot allocate a buffer of {} bytes per rank: rank {} is out of memory", rank_,
                            size, lacking))
        .with_rank(rank_)
        .with_peer(lacking)
        .with_operation("allocate", static_cast<int64_t>(sequence));
}

// --- messages

std::unique_ptr<Transfer> HierarchicalTransport::start(const Request& request, uint64_t sequence, Deadline deadline) {
    if (is_here(request.peer)) return local_->start(request, sequence, deadline);
    return wide_->start(request, sequence, deadline);
}

void HierarchicalTransport::wait(std::span<Transfer* const> transfers, const std::atomic<bool>& woken) {
    std::vector<Transfer*> near;
    std::vector<Transfer*> far;
    for (Transfer* transfer : transfers) {
        (dynamic_cast<gloo_transport::GlooTransfer*>(transfer) == nullptr ? near : far).push_back(transfer);
    }
    if (far.empty()) return local_->wait(near, woken);
    if (near.empty()) return wide_->wait(far, woken);
    if (wide_->wait_until(far, woken, Clock::now() + mixed_turn) || Clock::now() - last_look_ < look_pause) return;
    last_look_ = Clock::now();
    wide_->check(static_cast<gloo_transport::GlooTransfer*>(far[0])->headline());
    local_->check(near);
}

void HierarchicalTransport::wake() {
    local_->wake();
    wide_->wake();
}

// --- errors

// A rank that seems late may itself wait for another, on this host or elsewhere. The rank that waits for the late one
// directly reports first.
std::optional<Error> HierarchicalTransport::told_of_another(const Error& error, uint64_t sequence) const {
    const int accused = error.record()->peer;
    if (error.code() != Code::timeout || accused < 0) return std::nullopt;
    if (is_here(accused) && !local_->may_wait(accused, sequence)) return std::nullopt;
    const Deadline patience = Deadline::in(is_here(accused) ? 2 * hearsay_time : hearsay_time);
    while (!patience.expired()) {
        try {
            wide_->look("");
            local_->look("", shm::ShmTransport::Missing::is_lost);
        } catch (const Error& told) {
            return told;
        }
        std::this_thread::sleep_for(milliseconds{5});
    }
    return std::nullopt;
}

void HierarchicalTransport::abort(const Error& error) {
    wide_->abort(error);
    local_->abort(error);
}

void HierarchicalTransport::leave(uint64_t launched) {
    wide_->leave(launched);
    local_->leave(launched);
}

std::vector<int> HierarchicalTransport::departed() const {
    std::vector<int> ranks = wide_->departed();
    const std::vector<int> here = local_->departed();
    ranks.insert(ranks.end(), here.begin(), here.end());
    return ranks;
}

std::optional<Error> HierarchicalTransport::peer_error() const {
    if (auto error = local_->peer_error()) return error;
    return wide_->peer_error();
}

std::optional<Error> HierarchicalTransport::absent_from(const Operation& operation, uint64_t sequence) const {
    if (auto error = local_->absent_from(operation, sequence)) return error;
    return wide_->absent_from(operation, sequence);
}

}  // namespace hierarchical
}  // namespace tsr
