#include "comm/gloo/gloo_transport.hpp"

#include <fmt/core.h>
#include <gloo/transport/pair.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/log.hpp"
#include "base/proc.hpp"
#include "comm/disagreement.hpp"
#include "comm/gloo/arrival.hpp"
#include "comm/gloo/connect.hpp"
#include "comm/private_buffer.hpp"
#include "comm/timed_out.hpp"

namespace tsr {

std::unique_ptr<Transport> make_gloo_transport(Bootstrap bootstrap) {
    return std::make_unique<gloo_transport::GlooTransport>(std::move(bootstrap));
}

namespace gloo_transport {

namespace {

constexpr milliseconds slice{50};                // between two looks at the peers
constexpr milliseconds farewell_time{500};       // for the last notice to leave this process
constexpr milliseconds arrival_time{2000};       // for it to arrive, after a failure, behind data on a slow network
constexpr milliseconds drain_time{500};          // for messages that a failure cuts off to leave this process
constexpr std::chrono::microseconds glance{50};  // at a message that is probably not there
constexpr milliseconds last_word{100};           // more than the slice by which deadlines are noticed late
constexpr milliseconds pause{100};               // after which a rank looks at its peers before it begins anything

template <class T>
const std::byte* bytes_of(const T& value) {
    return reinterpret_cast<const std::byte*>(&value);
}

std::vector<Participant> each_for_itself(const std::vector<Peer>& peers) {
    std::vector<Participant> members;
    for (const Peer& peer : peers) members.push_back({peer.rank, {peer.rank}});
    return members;
}

}  // namespace

// --- making it

GlooTransport::GlooTransport(Bootstrap bootstrap)
    : rank_(bootstrap.rank),
      peers_(bootstrap.peers),
      everybody_(each_for_itself(peers_)),
      group_name_(bootstrap.options.name),
      connections_(connect_all(bootstrap)),
      heartbeat_(bootstrap.options.heartbeat),
      views_(peers_.size()),
      inboxes_(peers_.size()),
      entered_(peers_.size()),
      sent_messages_(peers_.size()) {
    find_other_hosts();
    for (int k = 1; k < world(); ++k) {
        await_farewell(after(k));
        await_next_notice(after(k));
    }
    // All ranks are connected, and use the same version of this transport, once this is through.
    Request request;
    request.label = "create";
    Call call = call_of(request, operation_of(request), 0, bootstrap.deadline.remaining(), everybody_, rank_);
    enter(call, {});
    forget_addresses(bootstrap);
}

GlooTransport::~GlooTransport() {
    GlooTransport::leave(0);
    // What was written to a socket arrives after the connection is closed, too.
    const auto until = Clock::now() + farewell_time;
    for (const auto& flight : farewell_flights_) {
        try {
            while (!flight->wait(waker_, until) && Clock::now() < until) {
            }
        } catch (const std::exception&) {
            // It is gone already.
        }
    }
    if (failure_) await_arrival(*connections_.context, Clock::now() + arrival_time);
    // Connections before the buffers that they fill. This close lets data that is on its way arrive.
    for (int k = 1; k < world(); ++k) connections_.context->getPair(after(k)).reset();
}

void GlooTransport::find_other_hosts() {
    if (heartbeat_.count() == 0) return;
    std::vector<OtherHost> hosts;  // in the order of their first ranks
    size_t own = 0;
    for (int r = 0; r < world(); ++r) {
        const Peer& peer = peers_[static_cast<size_t>(r)];
        const auto same = [&](const OtherHost& host) {
            return peers_[static_cast<size_t>(host.ranks[0])].same_host(peer);
        };
        if (const auto known = std::ranges::find_if(hosts, same); known != hosts.end()) {
            known->ranks.push_back(r);
            continue;
        }
        if (peer.same_host(peers_[static_cast<size_t>(rank_)])) own = hosts.size();
        hosts.push_back({{r}, std::make_unique<HostProbe>(heartbeat_)});
    }
    for (size_t k = 1; k < hosts.size(); ++k) other_hosts_.push_back(std::move(hosts[(own + k) % hosts.size()]));
}

GlooTransport::Call GlooTransport::call_of(const Request& request, const Operation& operation, uint64_t sequence,
                                           milliseconds timeout, std::span<const Participant> members, int place) {
    return {request, operation, sequence, Deadline::in(timeout), timeout, members, place};
}

// --- notices

void GlooTransport::await_farewell(int peer) {
    const std::lock_guard lock(view_mutex_);
    PeerView& view = views_[static_cast<size_t>(peer)];
    view.farewell = std::make_unique<Notice>();
    view.flight = std::make_unique<Flight>(*connections_.context, bytes_of(*view.farewell), sizeof(Notice), peer,
                                           Direction::receive);
    try {
        view.flight->post(slot::farewell);
    } catch (const std::exception&) {
        view.state = PeerState::gone;
    }
}

void GlooTransport::await_next_notice(int peer) {
    Inbox& inbox = inboxes_[static_cast<size_t>(peer)];
    if (!inbox.notice) {
        inbox.notice = std::make_unique<Notice>();
        inbox.flight = std::make_unique<Flight>(*connections_.context, bytes_of(*inbox.notice), sizeof(Notice), peer,
                                                Direction::receive);
    }
    try {
        inbox.flight->post(slot::enters);
    } catch (const std::exception&) {
        inbox.flight.reset();  // the peer is gone, which the next collective will find
        inbox.notice.reset();
    }
}

// Checks for the end of `peer`, waiting for it until `until` at most. Requires view_mutex_.
void GlooTransport::look_at(int peer, Clock::time_point until) const {
    PeerView& view = views_[static_cast<size_t>(peer)];
    if (view.state != PeerState::present) return;
    try {
        if (!view.flight->wait(waker_, until)) return;
        view.state = view.farewell->kind == Notice::Kind::left ? PeerState::left : PeerState::failed;
    } catch (const std::exception&) {
        view.state = PeerState::gone;
    }
}

void GlooTransport::look_at_all() const {
    const std::lock_guard lock(view_mutex_);
    for (int k = 1; k < world(); ++k) look_at(after(k), Clock::now() + glance);
}

void GlooTransport::tell_all(const Notice& notice) {
    const std::lock_guard lock(failure_mutex_);
    if (farewell_) return;
    farewell_ = std::make_unique<Notice>(notice);
    for (int k = 1; k < world(); ++k) {
        auto flight = std::make_unique<Flight>(*connections_.context, bytes_of(*farewell_), sizeof(Notice), after(k),
                                               Direction::send);
        try {
            flight->post(slot::farewell);
            farewell_flights_.push_back(std::move(flight));
        } catch (const std::exception&) {
            // Gone already.
        }
    }
}

void GlooTransport::drain(Flight& flight) const noexcept {
    if (flight.done() || flight.direction() != Direction::send) return;
    try {
        while (!flight.wait(waker_, Clock::now() + glance)) {
            const auto now = Clock::now();
            if (!drained_by_) drained_by_ = now + drain_time;
            if (now >= *drained_by_ || state_of(flight.peer()) != PeerState::present) return;
            if (flight.wait(waker_, std::min(now + slice, *drained_by_))) return;
            look_at_all();
        }
    } catch (const std::exception&) {
        // The peer is gone.
    }
}

bool GlooTransport::has_entered(int peer, std::optional<Clock::time_point> until, const std::string& headline) {
    Inbox& inbox = inboxes_[static_cast<size_t>(peer)];
    try {
        return inbox.flight && inbox.flight->wait(waker_, until);
    } catch (const std::exception&) {
        throw_broken(peer, headline);
    }
}

// The members that have not entered the collective. This rank waits for the `awaited`-th before it; earlier ones have
// entered.
std::vector<int> GlooTransport::late_ranks(const Call& call, int awaited) {
    std::vector<int> late;
    for (int k = awaited; k < call.size(); ++k) {
        const int peer = call.rank_at(call.before(k));
        if (!has_entered(peer, by_now, "")) late.push_back(peer);
    }
    std::ranges::sort(late);
    return late;
}

void GlooTransport::enter(Call& call, std::span<const std::byte> payload) {
    const std::string headline = tsr::headline(call.operation, call.sequence);
    // Peers may have failed while this rank did something else, and their earlier notices still look fine.
    if (Clock::now() - last_look_ > pause) look_at_all();
    throw_known_failure(headline);
    outgoing_ = Notice{};
    outgoing_.sequence = call.sequence;
    outgoing_.operation = call.operation;
    std::ranges::copy(payload, outgoing_.bytes.begin());
    Exchange sends(*this, call);
    for (int k = 1; k < call.size(); ++k) {
        sends.send(call.after(k), slot::enters, bytes_of(outgoing_), sizeof outgoing_);
    }
    for (int k = 1; k < call.size(); ++k) {
        const int peer = call.rank_at(call.before(k));
        while (!has_entered(peer, Clock::now() + slice, headline)) {
            check(headline);
            check_awaited(call, k, headline);
            if (call.deadline.expired()) throw_timeout(call, late_ranks(call, k), false);
        }
        Notice& notice = *inboxes_[static_cast<size_t>(peer)].notice;
        if (notice.magic != Notice::current_magic) {
            throw Error(Code::version,
                        fmt::format("rank {}: {} uses a different version of Tessera: its notice has another "
                                    "format",
                                    rank_, name_peer(peer)))
                .with_peer(peer);
        }
        entered_[static_cast<size_t>(peer)] = notice;
        await_next_notice(peer);
    }
    compare_fingerprints(call);
    sends.finish();
    last_look_ = Clock::now();
    const std::lock_guard lock(view_mutex_);
    last_operation_ = call.operation;
    last_sequence_ = call.sequence;
}

// --- errors

std::string GlooTransport::name_peer(int rank) const {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    if (peer.same_host(peers_[static_cast<size_t>(rank_)])) return fmt::format("rank {} (pid {})", rank, peer.pid);
    return fmt::format("rank {} (pid {}, host {})", rank, peer.pid, peer.host_name.data());
}

// Under view_mutex_.
std::string GlooTransport::last_operation() const {
    if (last_sequence_ == 0) return "it had not begun any operation";
    return "its last operation was " + tsr::headline(last_operation_, last_sequence_);
}

// Under view_mutex_.
Error GlooTransport::lost(int peer, const std::string& headline, bool ended) const {
    const std::string what = headline.empty() ? std::string() : headline + " failed: ";
    return Error(Code::peer_lost,
                 fmt::format("rank {}: {}{} {}; {}", rank_, what, name_peer(peer),
                             ended ? "ended, or its network was cut" : "left the communicator", last_operation()))
        .with_rank(rank_)
        .with_peer(peer);
}

Error GlooTransport::silent(int peer, const std::string& headline) const {
    const std::string what = headline.empty() ? std::string() : headline + " failed: ";
    return Error(Code::peer_lost,
                 fmt::format(
                     "rank {}: {}the host of {} has not answered for {} s: the host or the network to it is down. If "
                     "hosts may be unreachable for longer, raise the heartbeat timeout",
                     rank_, what, name_peer(peer), static_cast<double>(heartbeat_.count()) / 1000))
        .with_rank(rank_)
        .with_peer(peer);
}

// Under view_mutex_.
std::optional<Error> GlooTransport::told_failure(const std::string& headline) const {
    for (int r = 0; r < world(); ++r) {
        const PeerView& view = views_[static_cast<size_t>(r)];
        if (view.state != PeerState::failed) continue;
        Code code = static_cast<Code>(view.farewell->code);
        const int peer = view.farewell->peer >= 0 && view.farewell->peer < world() ? view.farewell->peer : r;
        // Codes about a third rank, or about all ranks, apply here too; any other error was that rank's alone.
        if (code != Code::timeout && code != Code::peer_lost && code != Code::mismatch) code = Code::aborted;
        const auto* text = reinterpret_cast<const char*>(view.farewell->bytes.data());
        const std::string what = headline.empty() ? std::string() : headline + " ended: ";
        return Error(code, fmt::format("rank {}: {}rank {} failed: {}", rank_, what, r,
                                       std::string_view(text, strnlen(text, Notice::inline_size))))
            .with_rank(rank_)
            .with_peer(peer);
    }
    return std::nullopt;
}

void GlooTransport::throw_known_failure(const std::string& headline) const {
    {
        const std::lock_guard lock(failure_mutex_);
        if (failure_) throw Error(*failure_);
    }
    const std::lock_guard lock(view_mutex_);
    if (const auto told = told_failure(headline)) {
        const std::lock_guard failure_lock(failure_mutex_);
        adopted_ = *std::ranges::find(views_, PeerState::failed, &PeerView::state)->farewell;
        throw Error(*told);
    }
}

// A death counts only for a rank that waits for the dead one, and that rank then tells the others: a rank that had
// finished everything may end.
void GlooTransport::check(const std::string& headline) const {
    look(headline);
    if (watch_others_) watch_others_(headline);
    check_next_host(headline);
    poll_interrupt();
}

// Throws if the next host that still has ranks does not answer. A host that all ranks have left may go away: nobody
// waits for it.
void GlooTransport::check_next_host(const std::string& headline) const {
    for (const OtherHost& host : other_hosts_) {
        const auto there = std::ranges::find_if(host.ranks, [this](int r) { return !has_ended(r); });
        if (there == host.ranks.end()) continue;
        if (host.probe->is_silent(connections_.held_ports[static_cast<size_t>(*there)])) throw silent(*there, headline);
        return;
    }
}

void GlooTransport::look(const std::string& headline) const {
    look_at_all();
    throw_known_failure(headline);
}

GlooTransport::PeerState GlooTransport::state_of(int peer) const {
    const std::lock_guard lock(view_mutex_);
    return views_[static_cast<size_t>(peer)].state;
}

bool GlooTransport::has_ended(int peer) const {
    const PeerState state = state_of(peer);
    return state == PeerState::left || state == PeerState::gone;
}

// A connection does not work any more; finds out why.
void GlooTransport::throw_broken(int peer, const std::string& headline) const {
    look_at_all();
    if (is_gone(peer)) {
        const std::lock_guard lock(view_mutex_);
        throw lost(peer, headline, true);
    }
    check(headline);
    const std::lock_guard lock(view_mutex_);
    throw lost(peer, headline, views_[static_cast<size_t>(peer)].state != PeerState::left);
}

// Throws if one of those still awaited has ended without entering.
void GlooTransport::check_awaited(const Call& call, int awaited, const std::string& headline) {
    for (int k = awaited; k < call.size(); ++k) {
        const int peer = call.rank_at(call.before(k));
        if (state_of(peer) == PeerState::present || has_entered(peer, by_now, headline)) continue;
        throw_broken(peer, headline);
    }
}

void GlooTransport::throw_timeout(const Call& call, std::vector<int> ranks, bool entered) const {
    drained_by_ = Clock::now();  // what was not sent by now is not waited for
    const std::string headline = tsr::headline(call.operation, call.sequence);
    // The late rank may itself wait for another one, in an earlier collective, and be about to report it.
    for (const auto end = Clock::now() + last_word; Clock::now() < end; std::this_thread::sleep_for(milliseconds{5})) {
        look(headline);
    }
    const std::lock_guard lock(view_mutex_);
    const auto is_stopped = [&](int r) {
        const Peer& peer = peers_[static_cast<size_t>(r)];
        return r != rank_ && peer.same_host(peers_[static_cast<size_t>(rank_)]) && process_is_stopped(peer.pid);
    };
    if (entered && std::ranges::none_of(ranks, is_stopped)) {
        // The awaited rank may itself wait for one that is stopped.
        const auto stopped = std::ranges::find_if(call.members, is_stopped, &Participant::rank);
        if (stopped != call.members.end()) ranks = {stopped->rank};
    }
    std::vector<Late> late;
    for (const int r : ranks) {
        const std::string other = entered || !elsewhere_ ? "" : elsewhere_(r);
        late.push_back({r, name_peer(r),
                        entered          ? "entered it but is not making progress"
                        : !other.empty() ? "is not in it: it " + other
                                         : "never entered it; " + last_operation(),
                        is_stopped(r)});
    }
    throw timed_out(rank_, headline, call.timeout, std::move(late));
}

void GlooTransport::compare_fingerprints(const Call& call) const {
    std::vector<Said> said;
    for (const Participant& member : call.members) {
        const Notice& notice = member.rank == rank_ ? outgoing_ : entered_[static_cast<size_t>(member.rank)];
        said.push_back({notice.operation, member.speaks_for});
    }
    const auto differs = [&](const Said& one) { return one.operation.fingerprint != call.operation.fingerprint; };
    if (std::ranges::any_of(said, differs)) throw disagreement(rank_, call.sequence, said);
}

void GlooTransport::abort(const Error& error) {
    Notice notice;
    notice.kind = Notice::Kind::failed;
    notice.code = static_cast<int32_t>(error.code());
    notice.peer = error.record()->peer;
    std::strncpy(reinterpret_cast<char*>(notice.bytes.data()), error.what(), Notice::inline_size - 1);
    {
        const std::lock_guard lock(failure_mutex_);
        if (failure_) return;
        failure_ = error;
        // A peer may learn of this rank's end before it learns of the first failure.
        if (adopted_) notice = *adopted_;
    }
    tell_all(notice);
    waker_.wake();
}

void GlooTransport::leave(uint64_t launched) {
    Notice notice;
    notice.kind = Notice::Kind::left;
    notice.sequence = launched;
    tell_all(notice);
}

std::vector<int> GlooTransport::departed() const {
    look_at_all();
    std::vector<int> ranks;
    for (int r = 0; r < world(); ++r) {
        if (has_ended(r)) ranks.push_back(r);
    }
    return ranks;
}

std::optional<Error> GlooTransport::peer_error() const {
    // A waiting issuing thread holds view_mutex_; it will report what it sees.
    const std::unique_lock lock(view_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return std::nullopt;
    for (int k = 1; k < world(); ++k) look_at(after(k), Clock::now() + glance);
    for (int r = 0; r < world(); ++r) {
        if (views_[static_cast<size_t>(r)].state == PeerState::gone) return lost(r, "", true);
    }
    return told_failure("");
}

std::optional<Error> GlooTransport::absent_from(const Operation& operation, uint64_t sequence) const {
    const std::unique_lock lock(view_mutex_, std::try_to_lock);  // as in peer_error()
    if (!lock.owns_lock()) return std::nullopt;
    for (int k = 1; k < world(); ++k) look_at(after(k), Clock::now() + glance);
    for (int r = 0; r < world(); ++r) {
        const PeerView& view = views_[static_cast<size_t>(r)];
        if (view.state != PeerState::left || view.farewell->sequence >= sequence) continue;
        return lost(r, tsr::headline(operation, sequence), false);
    }
    return std::nullopt;
}

// --- steps of a collective

Exchange::~Exchange() {
    for (Flight& flight : flights_) transport_.drain(flight);
}

void Exchange::post(int at, uint64_t slot, const std::byte* data, size_t size, Direction direction) {
    if (size == 0) return;
    const int peer = call_.rank_at(at);
    try {
        flights_.emplace_back(*transport_.connections_.context, data, size, peer, direction).post(slot);
    } catch (const std::exception&) {
        transport_.throw_broken(peer, headline(call_.operation, call_.sequence));
    }
}

void Exchange::send(int to, uint64_t slot, const std::byte* data, size_t size) {
    post(to, slot, data, size, Direction::send);
}

void Exchange::receive(int from, uint64_t slot, std::byte* data, size_t size) {
    post(from, slot, data, size, Direction::receive);
}

void Exchange::finish(Flight& flight) {
    while (!flight.done()) {
        const auto done_by = [&](std::optional<Clock::time_point> until) {
            try {
                return flight.wait(transport_.waker_, until);
            } catch (const std::exception&) {
                transport_.throw_broken(flight.peer(), headline(call_.operation, call_.sequence));
            }
        };
        if (done_by(Clock::now() + slice)) return;
        transport_.check(headline(call_.operation, call_.sequence));
        // Gloo reports nothing about a send that was posted just as the connection broke.
        if (transport_.is_gone(flight.peer()) && !done_by(by_now)) {
            transport_.throw_broken(flight.peer(), headline(call_.operation, call_.sequence));
        }
        if (call_.deadline.expired()) transport_.throw_timeout(call_, {flight.peer()}, true);
    }
}

void Exchange::finish() {
    while (next_ < flights_.size()) finish_next();
}

void Exchange::finish_next() { finish(flights_[next_++]); }

// --- transfers

GlooTransfer::GlooTransfer(GlooTransport& transport, const Request& request, uint64_t sequence, Deadline deadline)
    : transport_(transport),
      operation_(operation_of(request)),
      sequence_(sequence),
      deadline_(deadline),
      patience_(deadline.remaining()) {
    const Tensor& tensor = sending() ? request.inputs[0] : request.outputs[0];
    data_ = tensor.data;
    size_ = tensor.size_bytes();
    if (!sending()) {
        post(header_flight_, bytes_of(header_), sizeof header_, slot::header(operation_.tag));
        return;
    }
    header_.dtype = operation_.dtype;
    header_.tag = operation_.tag;
    header_.count = operation_.count;
    header_.size = size_;
    header_.number = ++transport_.sent_messages_[static_cast<size_t>(operation_.peer)];
    post(header_flight_, bytes_of(header_), sizeof header_, slot::header(operation_.tag));
    if (size_ > 0) post(data_flight_, data_, size_, slot::message(header_.number));
}

GlooTransfer::~GlooTransfer() {
    for (const auto* flight : {&header_flight_, &data_flight_}) {
        if (*flight) transport_.drain(**flight);
    }
}

void GlooTransfer::post(std::unique_ptr<Flight>& flight, const std::byte* data, size_t size, uint64_t slot) {
    flight = std::make_unique<Flight>(*transport_.connections_.context, data, size, operation_.peer,
                                      sending() ? Direction::send : Direction::receive);
    try {
        flight->post(slot);
    } catch (const std::exception&) {
        transport_.throw_broken(operation_.peer, headline());
    }
}

// Waits for whatever comes next; false if it has not come.
bool GlooTransfer::wait(std::optional<Clock::time_point> until) {
    Flight* next = header_done_ ? data_flight_.get() : header_flight_.get();
    if (next == nullptr) return true;
    try {
        return next->wait(transport_.waker_, until);
    } catch (const std::exception&) {
        transport_.throw_broken(operation_.peer, headline());
    }
}

Transfer::Progress GlooTransfer::advance() {
    bool moved = false;
    if (!header_done_) {
        if (wait(Clock::now() + glance)) {
            header_done_ = true;
            moved = true;
            if (!sending()) accept_header();
        }
    }
    if (header_done_ && (!data_flight_ || wait(Clock::now() + glance))) return Progress::done;
    if (moved) return Progress::moved;
    // Gloo reports nothing about a send that was posted just as the connection broke. Data that arrived before the end
    // counts.
    if (transport_.has_ended(operation_.peer)) {
        if (wait(by_now)) return Progress::moved;
        transport_.throw_broken(operation_.peer, headline());
    }
    if (!deadline_.expired()) return Progress::stuck;
    transport_.drained_by_ = Clock::now();
    const std::lock_guard lock(transport_.view_mutex_);
    throw Error(Code::timeout,
                fmt::format("rank {}: {} timed out after {} s: {} {}; {}. Check the log of rank {}, or raise the "
                            "timeout of the communicator",
                            transport_.rank_, headline(), static_cast<double>(patience_.count()) / 1000,
                            transport_.name_peer(operation_.peer), sending() ? "did not receive it" : "sent nothing",
                            transport_.last_operation(), operation_.peer))
        .with_peer(operation_.peer);
}

void GlooTransfer::accept_header() {
    if (header_.magic != MessageHeader::current_magic) {
        throw Error(Code::corrupt,
                    fmt::format("rank {}: {}: received an invalid message header", transport_.rank_, headline()));
    }
    if (header_.dtype != operation_.dtype || header_.count != operation_.count || header_.size != size_) {
        Operation sent = operation_;
        sent.collective = Collective::send;
        sent.dtype = header_.dtype;
        sent.count = header_.count;
        sent.peer = transport_.rank_;
        throw Error(Code::mismatch,
                    fmt::format("rank {}: {} does not match: rank {} called {}, rank {} {}", transport_.rank_,
                                headline(), operation_.peer, describe(sent), transport_.rank_, describe(operation_)))
            .with_peer(operation_.peer);
    }
    if (size_ > 0) post(data_flight_, data_, size_, slot::message(header_.number));
}

std::unique_ptr<Transfer> GlooTransport::start(const Request& request, uint64_t sequence, Deadline deadline) {
    return std::make_unique<GlooTransfer>(*this, request, sequence, deadline);
}

void GlooTransport::wait(std::span<Transfer* const> transfers, const std::atomic<bool>& woken) {
    if (wait_until(transfers, woken, Clock::now() + slice)) return;
    check(transfers.empty() ? "" : static_cast<GlooTransfer*>(transfers[0])->headline());
}

bool GlooTransport::wait_until(std::span<Transfer* const> transfers, const std::atomic<bool>& woken,
                               Clock::time_point end) {
    // One transfer is waited for; of several each gets a short while in turn.
    const auto turn =
        transfers.size() == 1 ? Clock::duration(milliseconds{2}) : Clock::duration(std::chrono::microseconds{200});
    while (Clock::now() < end) {
        for (Transfer* transfer : transfers) {
            if (woken.load(std::memory_order_acquire)) return true;
            if (static_cast<GlooTransfer*>(transfer)->wait(std::min(end, Clock::now() + turn))) return true;
        }
    }
    return false;
}

// --- buffers

std::shared_ptr<Buffer> GlooTransport::allocate(size_t size, uint64_t sequence, milliseconds timeout) {
    const Request request;
    Call call = call_of(request, allocation_of(size), sequence, timeout, everybody_, rank_);
    enter(call, {});
    std::shared_ptr<Buffer> buffer;
    try {
        buffer = std::make_shared<PrivateBuffer>(size);
    } catch (const std::bad_alloc&) {
        log::warning("rank {}: cannot allocate a buffer of {} bytes", rank_, size);
    }
    // All ranks learn whether all have it.
    const std::array<std::byte, 1> failed{std::byte{buffer ? uint8_t{0} : uint8_t{1}}};
    enter(call, failed);
    for (int r = 0; r < world(); ++r) {
        const bool well = r == rank_ ? buffer != nullptr : entered_[static_cast<size_t>(r)].bytes[0] == std::byte{0};
        if (well) continue;
        throw Error(Code::no_memory,
                    fmt::format("rank {}: cannot allocate a buffer of {} bytes per rank: rank {} is out of memory",
                                rank_, size, r))
            .with_rank(rank_)
            .with_peer(r)
            .with_operation("allocate", static_cast<int64_t>(sequence));
    }
    return buffer;
}

}  // namespace gloo_transport
}  // namespace tsr
