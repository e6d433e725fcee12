#include "comm/shm/channel.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "comm/shm/shm_transport.hpp"

namespace tsr::shm {

// The counters: head is stored by the sender alone, tail by the receiver alone, each after its copy and sequentially
// consistently (release for the data, the single order for the bell); the other end loads it the same way.

size_t ChannelEnd::filled() const {
    const uint64_t n = counters->head.load(std::memory_order_seq_cst) - counters->tail.load(std::memory_order_seq_cst);
    if (n > size) throw Error(Code::corrupt, "the counters of a channel between two ranks are invalid");
    return n;
}

void ChannelEnd::copy_in(uint64_t at, const std::byte* from, size_t n) const {
    const size_t begin = at & (size - 1);
    const size_t first = std::min(n, size - begin);
    if (first > 0) std::memcpy(ring + begin, from, first);
    if (n > first) std::memcpy(ring, from + first, n - first);
}

void ChannelEnd::copy_out(uint64_t at, std::byte* to, size_t n) const {
    const size_t begin = at & (size - 1);
    const size_t first = std::min(n, size - begin);
    if (first > 0) std::memcpy(to, ring + begin, first);
    if (n > first) std::memcpy(to + first, ring, n - first);
}

ShmTransfer::ShmTransfer(ShmTransport& transport, const Request& request, uint64_t sequence, Deadline deadline)
    : transport_(transport),
      operation_(operation_of(request)),
      sequence_(sequence),
      other_(transport.place_of(operation_.peer)),
      deadline_(deadline),
      patience_(deadline.remaining()) {
    const Tensor& tensor = sending() ? request.inputs[0] : request.outputs[0];
    data_ = tensor.data;
    size_ = tensor.size_bytes();
    if (sending()) {
        transport_.outboxes_[other_].queue.push_back(this);
    } else {
        transport_.inboxes_[other_].receivers.push_back(this);
    }
}

ShmTransfer::~ShmTransfer() {
    transport_.message_ended();
    if (sending()) {
        std::erase(transport_.outboxes_[other_].queue, this);
        return;
    }
    Inbox& inbox = transport_.inboxes_[other_];
    inbox.receivers.remove(this);
    if (inbox.current && inbox.current->sink == this) inbox.current->sink = nullptr;
}

Transfer::Progress ShmTransfer::advance() {
    const bool moved = sending() ? push() : pull();
    if (done_) return Progress::done;
    if (moved) return Progress::moved;
    if (!deadline_.expired()) return Progress::stuck;
    const std::string reason = sending() ? "received nothing of it" : "sent nothing";
    throw Error(Code::timeout,
                fmt::format("rank {}: {} timed out after {} s: {} {}{}; {}. Check the log of rank {}, or raise "
                            "the timeout of the communicator",
                            transport_.number(transport_.rank_), headline(),
                            static_cast<double>(patience_.count()) / 1000, transport_.name_peer(other_), reason,
                            moved_ > 0 ? " more" : "", transport_.last_operation(other_), peer()))
        .with_peer(peer());
}

bool ShmTransfer::may_move() const {
    if (sending()) {
        if (transport_.outboxes_[other_].queue.front() != this) return false;
        const ChannelEnd out = transport_.channel(transport_.rank_, other_);
        return out.size - out.filled() >= (header_sent_ ? 1 : sizeof(MessageHeader));
    }
    const Inbox& inbox = transport_.inboxes_[other_];
    const size_t filled = transport_.channel(other_, transport_.rank_).filled();
    return inbox.current ? filled > 0 : filled >= sizeof(MessageHeader);
}

bool ShmTransfer::push() {
    Outbox& outbox = transport_.outboxes_[other_];
    if (outbox.queue.front() != this) return false;
    const ChannelEnd out = transport_.channel(transport_.rank_, other_);
    uint64_t head = out.counters->head.load(std::memory_order_relaxed);
    size_t room = out.size - out.filled();
    if (!header_sent_) {
        if (room < sizeof(MessageHeader)) return false;
        const MessageHeader header{MessageHeader::current_magic, operation_.tag, operation_.dtype, operation_.count,
                                   size_};
        out.copy_in(head, reinterpret_cast<const std::byte*>(&header), sizeof header);
        head += sizeof header;
        room -= sizeof header;
        header_sent_ = true;
    } else if (room == 0) {
        return false;
    }
    // A quarter of the ring at a time, so that the receiver copies while this rank fills the next.
    const size_t n = std::min({room, size_ - moved_, out.size / 4});
    out.copy_in(head, data_ + moved_, n);
    moved_ += n;
    out.counters->head.store(head + n, std::memory_order_seq_cst);
    ring(transport_.page(other_).bell);
    if (moved_ == size_) {
        done_ = true;
        outbox.queue.pop_front();
    }
    return true;
}

// Whose message comes next: for the first receiver with its tag, unless an older message of that tag is set aside and
// still to be taken; else aside.
bool ShmTransfer::take_header(Inbox& inbox) {
    const ChannelEnd in = transport_.channel(other_, transport_.rank_);
    if (in.filled() < sizeof(MessageHeader)) return false;
    const uint64_t tail = in.counters->tail.load(std::memory_order_relaxed);
    Inbox::Message message;
    in.copy_out(tail, reinterpret_cast<std::byte*>(&message.header), sizeof message.header);
    if (message.header.magic != MessageHeader::current_magic) {
        throw Error(Code::corrupt, fmt::format("received an invalid message header from rank {}", peer()));
    }
    const bool overtakes = std::any_of(inbox.aside.begin(), inbox.aside.end(), [&](const Inbox::Message& older) {
        return older.header.tag == message.header.tag;
    });
    for (ShmTransfer* receiver : inbox.receivers) {
        if (overtakes || receiver->operation_.tag != message.header.tag) continue;
        receiver->accept(message);
        break;
    }
    if (message.sink == nullptr) {
        if (message.header.size > Inbox::max_aside_bytes - inbox.aside_bytes) throw too_much_aside(inbox, message);
        message.aside = true;
        message.bytes.resize(message.header.size);
        inbox.aside_bytes += message.header.size;
    }
    in.counters->tail.store(tail + sizeof message.header, std::memory_order_seq_cst);
    inbox.current = std::move(message);
    return true;
}

Error ShmTransfer::too_much_aside(const Inbox& inbox, const Inbox::Message& message) const {
    return Error(Code::no_memory,
                 fmt::format("rank {}: {}: rank {} sends {} bytes with tag {}, for which no receive is posted, and {} "
                             "bytes of other tags are already buffered; the limit is {} MiB per sender. Receive "
                             "messages in the order in which they are sent, or post their receives earlier",
                             transport_.number(transport_.rank_), headline(), peer(), message.header.size,
                             message.header.tag, inbox.aside_bytes, Inbox::max_aside_bytes >> 20))
        .with_peer(peer());
}

void ShmTransfer::accept(Inbox::Message& message) {
    const MessageHeader& header = message.header;
    if (header.dtype != operation_.dtype || header.count != operation_.count || header.size != size_) {
        Operation sent = operation_;
        sent.collective = Collective::send;
        sent.dtype = header.dtype;
        sent.count = header.count;
        sent.peer = transport_.number(transport_.rank_);
        throw Error(Code::mismatch,
                    fmt::format("rank {}: {} does not match: rank {} called {}, rank {} {}. No data was transferred",
                                transport_.number(transport_.rank_), headline(), peer(), describe(sent), sent.peer,
                                describe(operation_)))
            .with_peer(peer());
    }
    message.sink = this;
}

bool ShmTransfer::pull() {
    if (done_) return true;  // another receiver of this peer has moved its message
    Inbox& inbox = transport_.inboxes_[other_];
    // A message that was set aside before this receiver came?
    if (!inbox.current || inbox.current->sink != this) {
        for (auto message = inbox.aside.begin(); message != inbox.aside.end(); ++message) {
            if (message->header.tag != operation_.tag) continue;
            for (ShmTransfer* receiver : inbox.receivers) {
                if (receiver->operation_.tag != operation_.tag) continue;
                if (receiver != this) break;  // an older one gets it
                accept(*message);
                if (size_ > 0) std::memcpy(data_, message->bytes.data(), size_);
                inbox.aside_bytes -= message->bytes.size();
                inbox.aside.erase(message);
                inbox.receivers.remove(this);
                done_ = true;
                return true;
            }
            break;
        }
    }
    bool moved = false;
    while (!done_) {
        if (!inbox.current) {
            if (!take_header(inbox)) break;
            moved = true;
        }
        Inbox::Message& message = *inbox.current;
        const ChannelEnd in = transport_.channel(other_, transport_.rank_);
        const size_t n =
            std::min({in.filled(), static_cast<size_t>(message.header.size) - message.received, in.size / 4});
        if (n == 0 && message.received < message.header.size) break;
        std::byte* to = message.aside ? message.bytes.data() : message.sink->data_;
        const uint64_t tail = in.counters->tail.load(std::memory_order_relaxed);
        in.copy_out(tail, to + message.received, n);
        message.received += n;
        in.counters->tail.store(tail + n, std::memory_order_seq_cst);
        ring(transport_.page(other_).bell);
        moved = true;
        if (message.received < message.header.size) continue;
        if (message.aside) {
            inbox.aside.push_back(std::move(message));
        } else {
            message.sink->done_ = true;
            inbox.receivers.remove(message.sink);
        }
        inbox.current.reset();
        if (!inbox.aside.empty() && inbox.aside.back().header.tag == operation_.tag) break;
    }
    return moved;
}

ChannelEnd ShmTransport::channel(size_t from, size_t to) const {
    std::byte* base = segment_->data() + plan_.channel(from, to);
    return {reinterpret_cast<Channel*>(base), base + page_size, plan_.channel_size};
}

std::unique_ptr<Transfer> ShmTransport::start(const Request& request, uint64_t sequence, Deadline deadline) {
    auto transfer = std::make_unique<ShmTransfer>(*this, request, sequence, deadline);
    write_journal(page(rank_).journal, operation_of(request), sequence);
    if (alarmed()) throw_if_alarmed(transfer->headline());
    return transfer;
}

void ShmTransport::wait(std::span<Transfer* const> transfers, const std::atomic<bool>& woken) {
    const auto ready = [&] {
        return woken.load(std::memory_order_seq_cst) ||
               std::any_of(transfers.begin(), transfers.end(),
                           [](Transfer* t) { return static_cast<ShmTransfer*>(t)->may_move(); });
    };
    bool checked = false;
    const auto slice_done = [&] { return checked || ready(); };
    shm::wait(
        page(rank_).bell, patience_, slice_done, [this] { return alarmed(); },
        [&] {
            checked = true;  // the caller looks at deadlines
            if (!transfers.empty()) {
                const auto& first = static_cast<const ShmTransfer&>(*transfers[0]);
                write_journal(page(rank_).transfer, first.operation(), first.sequence());
                waits_for_message_ = true;
            }
            check(transfers);
            if (watch_others_) {
                watch_others_(transfers.empty() ? "" : static_cast<ShmTransfer*>(transfers[0])->headline());
            }
        });
}

void ShmTransport::check(std::span<Transfer* const> transfers) const {
    for (Transfer* transfer : transfers) {
        const auto& t = static_cast<ShmTransfer&>(*transfer);
        if (alarmed()) throw_if_alarmed(t.headline());
        const bool died = watch_.is_dead(static_cast<int>(t.other()));
        const bool left = page(t.other()).left.load(std::memory_order_acquire) != 0;
        if ((died || left) && !t.may_move()) throw lost(t.other(), t.headline(), !left);
    }
    poll_interrupt();
}

}  // namespace tsr::shm
