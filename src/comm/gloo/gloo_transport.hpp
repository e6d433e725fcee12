// The transport between hosts: our own algorithms over Gloo's point-to-point messages, because Gloo's collectives lack
// reduce-scatter, bf16 and avg, and guarantee no order of reduction. Here every reduction is computed once, by the rank
// that owns the slice, over the ranks' inputs in rank order, and its result is copied: all ranks and all runs get the
// same bits.
//
// A collective begins with a notice from each rank to every other (wire.hpp). It carries the fingerprint, so that a
// disagreement is detected before data moves, and all data of a small collective. A rank that fails or leaves sends a
// notice out of turn; one that dies closes its connections. Every slice of every wait checks for both.
//
// Gloo's connections are neither encrypted nor authenticated: use them on trusted networks only.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/gloo/connect.hpp"
#include "comm/gloo/flight.hpp"
#include "comm/gloo/host_probe.hpp"
#include "comm/gloo/wire.hpp"
#include "comm/transport.hpp"

namespace tsr::gloo_transport {

// A participant of a collective: a rank and those that it represents, itself first. It represents several when one rank
// of each host participates (hierarchical/).
struct Participant {
    int rank = 0;
    std::vector<int> speaks_for;
};

class GlooTransport final : public Transport {
   public:
    // One collective in progress, on the stack of run(). Members are identified by their index in `members`.
    struct Call {
        const Request& request;
        Operation operation;  // what the peers are told
        uint64_t sequence;
        Deadline deadline;
        milliseconds timeout;
        std::span<const Participant> members;
        int place = 0;  // of this rank among them

        [[nodiscard]] int size() const { return static_cast<int>(members.size()); }
        [[nodiscard]] int rank_at(int at) const { return members[static_cast<size_t>(at)].rank; }
        // The k-th member after this one, so that members start with different peers.
        [[nodiscard]] int after(int k) const { return (place + k) % size(); }
        [[nodiscard]] int before(int k) const { return (place + size() - k) % size(); }
    };

    explicit GlooTransport(Bootstrap bootstrap);
    ~GlooTransport() override;

    [[nodiscard]] std::string_view name() const override { return "gloo"; }
    void run(const Request& request, const Operation& operation, uint64_t sequence, milliseconds timeout) override;
    [[nodiscard]] std::unique_ptr<Transfer> start(const Request& request, uint64_t sequence,
                                                  Deadline deadline) override;
    void wait(std::span<Transfer* const> transfers, const std::atomic<bool>& woken) override;
    void wake() override { waker_.wake(); }
    [[nodiscard]] std::shared_ptr<Buffer> allocate(size_t size, uint64_t sequence, milliseconds timeout) override;
    void abort(const Error& error) override;
    void leave(uint64_t launched) override;
    void ask_elsewhere(std::function<std::string(int rank)> ask) override { elsewhere_ = std::move(ask); }
    [[nodiscard]] std::optional<Error> peer_error() const override;
    [[nodiscard]] std::optional<Error> absent_from(const Operation& operation, uint64_t sequence) const override;
    [[nodiscard]] std::vector<int> departed() const override;

    // --- for the hierarchical transport, whose collectives use this one's steps among a subset of the ranks
    [[nodiscard]] std::span<const Participant> everybody() const { return everybody_; }
    [[nodiscard]] static Call call_of(const Request& request, const Operation& operation, uint64_t sequence,
                                      milliseconds timeout, std::span<const Participant> members, int place);
    // Returns when every member has entered the same collective; sends `payload` to all.
    void enter(Call& call, std::span<const std::byte> payload);
    [[nodiscard]] const std::byte* payload_of(const Call& call, int at) const;
    static constexpr size_t max_payload = Notice::inline_size;

    // The data of a step, in chunks, so that the caller can prepare chunks and pass on results while others are in
    // flight. Each function is called once per chunk, in order. The memory of at most three chunks is in use at a time.
    struct Chunks {
        size_t count = 0;  // of elements, in chunks of `each`
        size_t each = 0;
        std::function<const std::byte*(size_t chunk)> input;  // ready to be read
        std::function<std::byte*(size_t chunk)> output;       // destination of the result; nullptr: not wanted
        std::function<void(size_t chunk)> done;               // the result is complete

        [[nodiscard]] size_t number() const { return (count + each - 1) / each; }
        [[nodiscard]] size_t length(size_t chunk) const { return std::min(each, count - chunk * each); }
    };
    static constexpr size_t chunks_in_flight = 3;
    // Reduces to member `root`, or to all if it is -1. `divisor` is used by avg.
    void reduce_chunks(Call& call, const Chunks& chunks, DType dtype, int root, size_t divisor);
    // For a rank that is not a member of reduce_chunks() but participates in input() and done() of one that is: calls
    // them in the same order.
    static void follow_reduction(const Chunks& chunks);
    // Copies the inputs of member `root` into the others' outputs. Elements are bytes.
    void broadcast_chunks(Call& call, const Chunks& chunks, int root);

    // For waits on something else: throws if a peer has reported a failure.
    void look(const std::string& headline) const;
    // Throws the reason to end an operation: this rank's abort, a peer's failure, an error of watch_too(), an
    // interrupt.
    void check(const std::string& headline) const;
    // `watch` is called in each slice of a wait, with the headline; throws to end the wait.
    void watch_too(std::function<void(const std::string& headline)> watch) { watch_others_ = std::move(watch); }
    // Like wait(), but until `until`. Returns false if no transfer can make progress.
    [[nodiscard]] bool wait_until(std::span<Transfer* const> transfers, const std::atomic<bool>& woken,
                                  Clock::time_point until);

   private:
    friend class Exchange;
    friend class GlooTransfer;

    // The last known state of a peer.
    enum class PeerState { present, failed, left, gone };
    struct PeerView {
        PeerState state = PeerState::present;
        std::unique_ptr<Notice> farewell;  // lands here
        std::unique_ptr<Flight> flight;
    };
    // A peer's next notice that it has entered a collective.
    struct Inbox {
        std::unique_ptr<Notice> notice;
        std::unique_ptr<Flight> flight;
    };

    void find_other_hosts();

    // --- notices (gloo_transport.cc)
    void await_farewell(int peer);
    void await_next_notice(int peer);
    [[nodiscard]] bool has_entered(int peer, std::optional<Clock::time_point> until, const std::string& headline);
    [[nodiscard]] std::vector<int> late_ranks(const Call& call, int awaited);
    void look_at(int peer, Clock::time_point until) const;
    void look_at_all() const;
    void tell_all(const Notice& notice);
    // Call before the memory being sent is freed. Once a message is cut off in the middle, Gloo sends nothing more to
    // that peer, not even why this rank fails. So messages interrupted by a failure get drain_time in total to complete
    // first.
    void drain(Flight& flight) const noexcept;

    // --- errors (gloo_transport.cc)
    void throw_known_failure(const std::string& headline) const;
    [[nodiscard]] PeerState state_of(int peer) const;
    [[nodiscard]] bool is_gone(int peer) const { return state_of(peer) == PeerState::gone; }
    [[nodiscard]] bool has_ended(int peer) const;  // orderly or not
    void check_next_host(const std::string& headline) const;
    void check_awaited(const Call& call, int awaited, const std::string& headline);
    [[noreturn]] void throw_broken(int peer, const std::string& headline) const;
    [[nodiscard]] std::optional<Error> told_failure(const std::string& headline) const;
    [[nodiscard]] Error lost(int peer, const std::string& headline, bool ended) const;
    [[nodiscard]] Error silent(int peer, const std::string& headline) const;
    [[noreturn]] void throw_timeout(const Call& call, std::vector<int> ranks, bool entered) const;
    void compare_fingerprints(const Call& call) const;
    [[nodiscard]] std::string name_peer(int rank) const;
    [[nodiscard]] std::string last_operation() const;

    // --- algorithms (collectives.cc)
    void all_reduce(Call& call);
    void broadcast(Call& call);
    void broadcast_bytes(Call& call, std::byte* data, size_t size);
    void reduce_memory(Call& call, const std::byte* in, std::byte* out, size_t count, DType dtype, int root);
    void reduce_scatter(Call& call);
    void reduce_scatter(Call& call, const Tensor& input, const Tensor& output);
    void all_gather(Call& call);
    void gather_all(Call& call, const Tensor& input, std::span<const Tensor> outputs);
    void exchange_all(Call& call, const Tensor& input, std::span<const Tensor> outputs);
    void gather(Call& call);
    void scatter(Call& call);
    void all_to_all(Call& call);
    // The data in the notices of a small collective, by place.
    [[nodiscard]] std::vector<const std::byte*> payloads(const Call& call, const std::byte* own) const;

    [[nodiscard]] int world() const { return static_cast<int>(peers_.size()); }
    [[nodiscard]] int after(int k) const { return (rank_ + k) % world(); }

    int rank_;
    std::vector<Peer> peers_;
    std::vector<Participant> everybody_;
    std::function<void(const std::string& headline)> watch_others_;
    std::function<std::string(int rank)> elsewhere_;
    std::string group_name_;
    Connections connections_;
    struct OtherHost {
        std::vector<int> ranks;
        std::unique_ptr<HostProbe> probe;
    };
    std::vector<OtherHost> other_hosts_;  // in order from the next host; empty if hosts are not probed
    milliseconds heartbeat_;
    mutable Waker waker_;

    mutable std::mutex view_mutex_;  // guards the next three
    mutable std::vector<PeerView> views_;
    Operation last_operation_;  // the last collective that all ranks have entered
    uint64_t last_sequence_ = 0;

    // Of the issuing thread: the next notices and those of the current collective, by rank, and this rank's own.
    std::vector<Inbox> inboxes_;
    std::vector<Notice> entered_;
    Notice outgoing_;
    Clock::time_point last_look_ = Clock::now();
    std::vector<std::byte> staging_;                       // of reductions
    mutable std::optional<Clock::time_point> drained_by_;  // set by a failure

    mutable std::mutex failure_mutex_;  // guards failure_, adopted_, farewell_ and its flights
    std::optional<Error> failure_;
    mutable std::optional<Notice> adopted_;  // the failure reported by a peer, forwarded unchanged
    std::unique_ptr<Notice> farewell_;
    std::vector<std::unique_ptr<Flight>> farewell_flights_;

    std::vector<uint64_t> sent_messages_;  // to each rank
};

// The messages of one step of a collective, posted together.
class Exchange {
   public:
    Exchange(GlooTransport& transport, const GlooTransport::Call& call) : transport_(transport), call_(call) {}
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;
    ~Exchange();

    // `to` and `from` are places. Messages of zero bytes are skipped on both sides.
    void send(int to, uint64_t slot, const std::byte* data, size_t size);
    void receive(int from, uint64_t slot, std::byte* data, size_t size);
    // Waits for all messages posted so far. Throws TIMEOUT naming the late rank, PEER_LOST, ABORTED, INTERRUPTED.
    void finish();
    // Waits for the earliest message not yet waited for.
    void finish_next();

   private:
    void post(int at, uint64_t slot, const std::byte* data, size_t size, Direction direction);
    void finish(Flight& flight);

    GlooTransport& transport_;
    const GlooTransport::Call& call_;
    std::deque<Flight> flights_;
    size_t next_ = 0;
};

class GlooTransfer final : public Transfer {
   public:
    GlooTransfer(GlooTransport& transport, const Request& request, uint64_t sequence, Deadline deadline);
    GlooTransfer(const GlooTransfer&) = delete;
    GlooTransfer& operator=(const GlooTransfer&) = delete;
    ~GlooTransfer() override;
    Progress advance() override;

    // Waits until it may make progress, `until` at most.
    [[nodiscard]] bool wait(std::optional<Clock::time_point> until);
    [[nodiscard]] std::string headline() const { return tsr::headline(operation_, sequence_); }

   private:
    [[nodiscard]] bool sending() const { return operation_.collective == Collective::send; }
    void post(std::unique_ptr<Flight>& flight, const std::byte* data, size_t size, uint64_t slot);
    void accept_header();

    GlooTransport& transport_;
    Operation operation_;
    uint64_t sequence_;
    Deadline deadline_;
    milliseconds patience_;
    std::byte* data_;
    size_t size_;
    MessageHeader header_;
    std::unique_ptr<Flight> header_flight_;
    std::unique_ptr<Flight> data_flight_;
    bool header_done_ = false;
};

}  // namespace tsr::gloo_transport
