// The transport between hosts: Gloo's point-to-point messages under our own algorithms, because Gloo's collectives lack
// a reduce-scatter, bf16 and avg, and promise no order of reduction. Here every reduction is done once, by the rank that
// owns the slice, over the ranks' inputs in rank order, and its result is copied: all ranks and all runs get the same bits.
//
// A collective begins with a notice from each rank to each (wire.hpp): it carries the fingerprint, so that ranks that
// disagree notice before data moves, and the whole data of a small collective. A rank that fails or leaves says so with a
// notice out of turn; one that dies closes its connections. Both are looked for in every slice of every wait.
//
// Gloo's connections are neither encrypted nor authenticated: for trusted networks.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/gloo/flight.hpp"
#include "comm/gloo/wire.hpp"
#include "comm/transport.hpp"

namespace tsr::gloo_transport {

class GlooTransport final : public Transport {
   public:
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
    void leave() override;
    [[nodiscard]] std::optional<Error> peer_error() const override;

   private:
    friend class Exchange;
    friend class GlooTransfer;

    // One collective in progress, on the stack of run().
    struct Call {
        const Request& request;
        Operation operation;
        uint64_t sequence;
        Deadline deadline;
        milliseconds timeout;
    };

    // What has become of a peer, as far as is known.
    enum class PeerState { present, failed, left, gone };
    struct PeerView {
        PeerState state = PeerState::present;
        std::unique_ptr<Notice> farewell;  // lands here
        std::unique_ptr<Flight> flight;
    };
    // A peer's next notice that it enters a collective.
    struct Inbox {
        std::unique_ptr<Notice> notice;
        std::unique_ptr<Flight> flight;
    };

    // --- notices (gloo_transport.cc)
    void enter(Call& call, std::span<const std::byte> payload);
    void await_farewell(int peer);
    void await_next_notice(int peer);
    [[nodiscard]] bool has_entered(int peer, Clock::time_point until, const std::string& headline);
    [[nodiscard]] std::vector<int> late_ranks(int awaited);
    void look_at(int peer, Clock::time_point until) const;
    void look_at_all() const;
    void tell_all(const Notice& notice);

    // --- errors (gloo_transport.cc)
    [[nodiscard]] Call call_of(const Request& request, const Operation& operation, uint64_t sequence,
                               milliseconds timeout) const;
    // Throws what ends an operation: this rank's abort, a peer's failure or death, an interrupt.
    void check(const std::string& headline) const;
    void throw_known_failure(const std::string& headline) const;
    void check_awaited(int awaited, const std::string& headline);
    [[noreturn]] void throw_broken(int peer, const std::string& headline) const;
    [[nodiscard]] std::optional<Error> told_failure(const std::string& headline) const;
    [[nodiscard]] Error lost(int peer, const std::string& headline, bool died) const;
    [[noreturn]] void throw_timeout(const Call& call, const std::vector<int>& late, bool entered) const;
    void compare_fingerprints(const Call& call) const;
    [[nodiscard]] std::string name_peer(int rank) const;
    [[nodiscard]] std::string last_operation() const;

    // --- algorithms (collectives.cc)
    void all_reduce(Call& call);
    void broadcast(Call& call);
    void broadcast_bytes(Call& call, std::byte* data, size_t size);
    void reduce_slices(Call& call, const std::byte* in, std::byte* out, size_t count, DType dtype, int root);
    void reduce_scatter(Call& call);
    void gather_all(Call& call, const Tensor& input, std::span<const Tensor> outputs);
    void gather(Call& call);
    void scatter(Call& call);
    void all_to_all(Call& call);
    // The notices' data of a small collective, by rank.
    [[nodiscard]] std::vector<const std::byte*> payloads(const std::byte* own) const;

    [[nodiscard]] int world() const { return static_cast<int>(peers_.size()); }
    // The k-th peer after this rank, so that not all ranks begin with the same one.
    [[nodiscard]] int after(int k) const { return (rank_ + k) % world(); }
    [[nodiscard]] int before(int k) const { return (rank_ + world() - k) % world(); }

    int rank_;
    std::vector<Peer> peers_;
    std::string group_name_;
    std::shared_ptr<::gloo::transport::Context> context_;
    mutable Waker waker_;

    mutable std::mutex view_mutex_;  // guards the next three
    mutable std::vector<PeerView> views_;
    Operation last_operation_;  // the last collective that all have entered
    uint64_t last_sequence_ = 0;

    // The issuing thread's: notices to come, those of the collective in progress, by rank, and this rank's own.
    std::vector<Inbox> inboxes_;
    std::vector<Notice> entered_;
    Notice outgoing_;
    Clock::time_point last_look_ = Clock::now();
    std::vector<std::byte> staging_;  // of reductions

    mutable std::mutex failure_mutex_;  // guards failure_, adopted_, farewell_ and its flights
    std::optional<Error> failure_;
    mutable std::optional<Notice> adopted_;  // the failure was told by a peer: told on as it was
    std::unique_ptr<Notice> farewell_;
    std::vector<std::unique_ptr<Flight>> farewell_flights_;

    std::vector<uint64_t> sent_messages_;  // to each rank
};

// Messages of one step of a collective, posted together.
class Exchange {
   public:
    Exchange(GlooTransport& transport, const GlooTransport::Call& call) : transport_(transport), call_(call) {}
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    // Nothing is sent for no bytes, on either side.
    void send(int peer, uint64_t slot, const std::byte* data, size_t size);
    void receive(int peer, uint64_t slot, std::byte* data, size_t size);
    // Waits for all posted so far. Throws TIMEOUT naming whom, PEER_LOST, ABORTED, INTERRUPTED.
    void finish();
    // Waits for the earliest receive not waited for yet.
    void finish_next_receive();

   private:
    void post(int peer, uint64_t slot, const std::byte* data, size_t size, Direction direction);
    void finish(Flight& flight);

    GlooTransport& transport_;
    const GlooTransport::Call& call_;
    std::deque<Flight> flights_;
    size_t next_receive_ = 0;
};

class GlooTransfer final : public Transfer {
   public:
    GlooTransfer(GlooTransport& transport, const Request& request, uint64_t sequence, Deadline deadline);
    Progress advance() override;

    // Waits until it may move, `until` at most.
    [[nodiscard]] bool wait(Clock::time_point until);
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
