// The transport between ranks of one host. All ranks map one segment (layout.hpp); a collective is a sequence of
// synchronisation points that all ranks pass.
//
// The invariant behind all algorithms: points are numbered 1, 2, 3 ... by `stamp_`. Before point k a rank writes only
// to half k & 1 of its own Arrival and to slot k % slots of its staging (and, where ranks write into each other's
// buffers, to ranges that no other rank accesses between the same two points). After point k it reads the same parts of
// its peers, until it arrives at point k + 1. Half k & 1 is written again between k + 1 and k + 2, the slot then or
// later: all ranks have arrived at k + 1, so nobody reads them any more. So one point per step suffices. The stamp is
// stored with release and loaded with acquire (in fact sequentially consistent, see wait.hpp), which orders all data
// around it, also on weakly ordered processors.
//
// The first point of a collective carries the fingerprint of each rank's operation: all compare before any data moves.
//
// Internally, a rank is its index among the peers. Arguments and errors use Peer::rank: the two differ when the ranks
// of a host are a subset of a communicator (hierarchical/).
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "comm/peer_watch.hpp"
#include "comm/shm/buffers.hpp"
#include "comm/shm/byte_list.hpp"
#include "comm/shm/channel.hpp"
#include "comm/shm/layout.hpp"
#include "comm/shm/stores.hpp"
#include "comm/shm/wait.hpp"
#include "comm/transport.hpp"

namespace tsr::shm {

class ShmTransport final : public Transport {
   public:
    explicit ShmTransport(Bootstrap bootstrap);
    ~ShmTransport() override;

    [[nodiscard]] std::string_view name() const override { return "shm"; }
    void run(const Request& request, const Operation& operation, uint64_t sequence, milliseconds timeout) override;
    [[nodiscard]] std::unique_ptr<Transfer> start(const Request& request, uint64_t sequence,
                                                  Deadline deadline) override;
    void wait(std::span<Transfer* const> transfers, const std::atomic<bool>& woken) override;
    void wake() override;
    [[nodiscard]] std::shared_ptr<Buffer> allocate(size_t size, uint64_t sequence, milliseconds timeout) override;
    void abort(const Error& error) override;
    void leave(uint64_t launched) override;
    [[nodiscard]] std::optional<Error> peer_error() const override;
    [[nodiscard]] std::optional<Error> absent_from(const Operation& operation, uint64_t sequence) const override;
    [[nodiscard]] std::vector<int> departed() const override;
    [[nodiscard]] std::string doing(int rank) const override;
    void ask_elsewhere(std::function<std::string(int rank)> ask) override { elsewhere_ = std::move(ask); }

    // For waits on something else: throws if a peer has failed or, with `is_lost`, has died.
    enum class Missing { may_be, is_lost };
    void look(const std::string& headline, Missing missing) const;
    // Throws the reason to end a wait for these transfers, if any.
    void check(std::span<Transfer* const> transfers) const;
    // Whether a rank that is late in this operation may itself be waiting: it has entered it, and its process is
    // running.
    [[nodiscard]] bool may_wait(int rank, uint64_t sequence) const;
    // `watch` is called in each slice of a wait, with the headline; throws to end the wait.
    void watch_too(std::function<void(const std::string& headline)> watch) { watch_others_ = std::move(watch); }

   private:
    friend class ShmTransfer;

    // One collective in progress, on the stack of run().
    struct Call {
        const Request& request;
        const Operation& operation;
        uint64_t sequence = 0;
        milliseconds timeout{0};
        std::optional<Deadline> deadline{};  // set at the first longer wait, since reading the clock is costly
        bool entered = false;                // the fingerprints have been compared
        Location input{};
        Location output{};
    };

    // --- making it (shm_transport.cc)
    void meet(const Endpoint& endpoint, Deadline deadline, const SliceCheck& check);
    [[nodiscard]] std::shared_ptr<Segment> share(size_t size, Deadline deadline, const SliceCheck& check);

    // --- synchronisation and errors (shm_transport.cc)
    void begin(Call& call);
    void finish(Call& call);
    void sync(Call& call);  // the next synchronisation point
    void sync_segment(Call& call, size_t done, size_t n,
                      size_t full);                             // of one in a loop, whose segments are `full` long
    [[nodiscard]] size_t first_ranks_here(size_t known) const;  // how many, in order, have reached the point
    void await_others(Call& call, size_t here);                 // until all have
    void pulse();                                               // now and then in long copies: interruption and alarm
    void compare_fingerprints(const Call& call) const;
    void check(Call& call);  // in each slice of a wait
    // A rank has reported a failure; its record was stored before the alarm.
    [[nodiscard]] bool alarmed() const { return header().alarm.load(std::memory_order_seq_cst) != 0; }
    void throw_if_alarmed(const std::string& headline) const;
    [[noreturn]] void throw_timeout(const Call& call, const std::vector<size_t>& places) const;
    [[nodiscard]] std::optional<Error> told_failure(const std::string& headline) const;
    [[nodiscard]] std::vector<size_t> late_ranks() const;
    // The first rank whose process ended without leaving or reporting a failure.
    [[nodiscard]] std::optional<size_t> first_dead() const;
    void message_ended() {
        if (std::exchange(waits_for_message_, false)) {
            page(rank_).transfer.finished.store(1, std::memory_order_release);
        }
    }
    static void write_journal(Journal& journal, const Operation& operation, uint64_t sequence);
    [[nodiscard]] Error lost(size_t place, const std::string& headline, bool ended) const;
    [[nodiscard]] std::string name_peer(size_t place) const;       // "rank 3 (pid 8123)"
    [[nodiscard]] std::string last_operation(size_t place) const;  // "its last operation was broadcast #411"
    // Describes where a rank that is late in `call` is.
    [[nodiscard]] std::string whereabouts(size_t place, const Call& call) const;

    // --- collectives (collectives.cc, reductions.cc)
    void all_reduce(Call& call);
    void reduce_scatter(Call& call);
    void all_gather(Call& call);
    void all_gather_v(Call& call);
    void broadcast(Call& call);
    void reduce(Call& call);
    void gather(Call& call);
    void scatter(Call& call);
    void all_to_all(Call& call);
    void exchange_reduce(Call& call, const ByteList& list);
    void staged_reduce(Call& call, const ByteList& input, const ByteList* output);
    void stage(std::byte* to, const std::byte* from, size_t n);
    void stage(std::byte* to, const ByteList& from, size_t offset, size_t n);
    void copy_far(std::byte* to, const std::byte* from, size_t n);  // a long copy, with a pulse
    [[nodiscard]] Location locate(const ByteList& list) const;      // in a buffer, if it is one piece
    // The region in which every rank has its `which` location, id 0 if there is none; places_[r] becomes the offset in
    // rank r's region, checked to leave room for `size` bytes.
    [[nodiscard]] Region common_region(Location Arrival::* which, size_t size);

    [[nodiscard]] size_t world() const { return plan_.world_size; }
    [[nodiscard]] int number(size_t place) const { return peers_[place].rank; }
    [[nodiscard]] size_t place_of(int rank) const;
    [[nodiscard]] Header& header() const { return *reinterpret_cast<Header*>(segment_->data()); }
    [[nodiscard]] RankPage& page(size_t rank) const {
        return *reinterpret_cast<RankPage*>(segment_->data() + plan_.rank_page(rank));
    }
    // The arrivals of this point, by rank. Take it before a loop: each load of a stamp makes the compiler reload
    // everything.
    struct Arrivals {
        const std::byte* first;
        const Arrival& operator[](size_t rank) const {
            return *reinterpret_cast<const Arrival*>(first + rank * sizeof(RankPage));
        }
    };
    [[nodiscard]] Arrivals arrivals() const {
        return {reinterpret_cast<const std::byte*>(&page(0).arrivals[stamp_ & 1])};
    }
    [[nodiscard]] const Arrival& arrival(size_t rank) const { return arrivals()[rank]; }
    [[nodiscard]] Arrival& next_arrival() { return page(rank_).arrivals[(stamp_ + 1) & 1]; }
    // The input part of a rank's staging, in the slot of this point or, for writing, of the next.
    [[nodiscard]] std::byte* staging(size_t rank) const { return slot(rank, stamp_); }
    [[nodiscard]] std::byte* next_staging() const { return slot(rank_, stamp_ + 1); }
    [[nodiscard]] std::byte* slot(size_t rank, uint64_t point) const {
        return segment_->data() + plan_.staging(rank) + (point & (plan_.slots - 1)) * slot_size;
    }
    [[nodiscard]] std::byte* result(size_t rank) const { return staging(rank) + segment_size; }
    [[nodiscard]] std::byte* next_result() const { return next_staging() + segment_size; }
    [[nodiscard]] ChannelEnd channel(size_t from, size_t to) const;

    const size_t rank_;
    const std::vector<Peer> peers_;
    const std::string name_;
    const SegmentPlan plan_;
    PeerWatch watch_;
    std::vector<Link> links_;  // rank 0: to each rank; others: [0] to rank 0. Empty for this rank
    std::shared_ptr<Segment> segment_;
    Patience patience_;
    Stores stores_{plan_.slots};
    std::function<void(const std::string& headline)> watch_others_;
    std::function<std::string(int rank)> elsewhere_;
    bool waits_for_message_ = false;  // as its page shows; of the issuing thread

    uint64_t stamp_ = 0;  // of the last synchronisation point; the issuing thread's
    std::shared_ptr<BufferTable> buffers_ = std::make_shared<BufferTable>();
    uint64_t last_buffer_ = 0;
    std::vector<const std::byte*> sources_;  // scratch of reductions
    std::vector<size_t> places_;             // scratch of common_region
    std::vector<std::byte> block_;           // scratch: one block of results
    ByteList input_;                         // scratch: the request's lists,
    ByteList output_;                        //
    std::vector<ByteList> parts_;            // and each rank's parts of one
    std::vector<Outbox> outboxes_;           // by peer; the issuing thread's
    std::vector<Inbox> inboxes_;

    mutable std::mutex failure_mutex_;  // guards both below
    std::optional<Error> failure_;      // this rank's failure
    mutable bool adopted_ = false;      // it came from a peer, which has notified everybody
};

}  // namespace tsr::shm
