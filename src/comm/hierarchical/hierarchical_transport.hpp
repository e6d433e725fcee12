// The transport for several hosts with several ranks: shared memory within a host, Gloo between hosts. The first rank
// of each host is its leader. A reduction goes from the ranks into their leader's memory, between the leaders, and
// back, so that each byte crosses the network as often as with one rank per host; in chunks, so that the network never
// waits for memory. Operations that only move data from one rank to another go directly between the two.
//
// Agreement. The first step of a collective uses shared memory: the ranks of a host compare their operations. Then the
// leaders compare on behalf of their hosts. No rank's output is written before its leader knows that all operations
// match. The last step uses shared memory again, after all Gloo traffic of this host: between these two steps a missing
// rank of the host counts as lost.
//
// Failures. Every rank is connected to every other through Gloo, for messages and for failures: a failing rank notifies
// all others, those on its host through shared memory too. A wait on one of the two paths also checks the other.
//
// Reductions have a fixed order: the ranks of a host in rank order, then the hosts in the order of their leaders.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/gloo/gloo_transport.hpp"
#include "comm/shm/shm_transport.hpp"
#include "comm/transport.hpp"

namespace tsr::hierarchical {

using gloo_transport::Exchange;
using gloo_transport::GlooTransport;
using gloo_transport::Participant;

class HierarchicalTransport final : public Transport {
   public:
    explicit HierarchicalTransport(Bootstrap bootstrap);

    [[nodiscard]] std::string_view name() const override { return "hierarchical"; }
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
    [[nodiscard]] std::string doing(int rank) const override { return is_here(rank) ? local_->doing(rank) : ""; }
    void ask_elsewhere(std::function<std::string(int rank)> ask) override {
        local_->ask_elsewhere(ask);
        wide_->ask_elsewhere(std::move(ask));
    }

   private:
    // One collective in progress, on the stack of run().
    struct Call {
        const Request& request;
        const Operation& operation;
        uint64_t sequence;
        milliseconds timeout;
    };
    using Piece = std::function<void(size_t chunk)>;

    // --- hierarchical_transport.cc
    void dispatch(const Call& call);
    void whole(uint64_t sequence, const std::function<void()>& collective);
    // A step of the call among the ranks of this host.
    void local(const Call& call, const Request& step);
    void local_barrier(const Call& call) { local(call, {}); }
    void local_message(const Call& call, Collective direction, int peer, const Tensor& tensor);
    [[nodiscard]] GlooTransport::Call among_leaders(const Call& call) const;
    [[nodiscard]] GlooTransport::Call among_all(const Call& call) const;
    // Returns once the operations of all ranks on all hosts match.
    void enter(const Call& call);
    [[nodiscard]] std::optional<Error> told_of_another(const Error& error, uint64_t sequence) const;

    // --- collectives.cc
    void all_reduce(const Call& call);
    void all_reduce_small(const Call& call, size_t size);
    void broadcast(const Call& call);
    void reduce(const Call& call);
    void reduce_scatter(const Call& call);
    void reduce_scatter(const Call& call, const Tensor& input, const Tensor& output);
    void all_gather(const Call& call);
    void all_gather_v(const Call& call);
    void gather_all(const Call& call, const Tensor& input, std::span<const Tensor> outputs);
    void gather(const Call& call);
    void scatter(const Call& call);
    void all_to_all(const Call& call);
    // Reduces the ranks' inputs, `size` bytes, into the leader's `to`.
    void reduce_to_leader(const Call& call, std::span<const Tensor> inputs, std::byte* to, size_t size);
    // The leader's memory for a chunk of up to max_chunk_bytes; three consecutive chunks do not overlap.
    [[nodiscard]] std::byte* chunk_memory(size_t chunk) const {
        return chunks_->data() + chunk % GlooTransport::chunks_in_flight * max_chunk_bytes;
    }
    static constexpr size_t max_chunk_bytes = size_t{1} << 20;

    [[nodiscard]] const std::vector<int>& host(size_t at) const { return hosts_[at].speaks_for; }
    [[nodiscard]] const std::vector<int>& own_host() const { return host(own_host_); }
    [[nodiscard]] int leader() const { return own_host().front(); }
    [[nodiscard]] bool is_leader() const { return rank_ == leader(); }
    [[nodiscard]] bool is_here(int rank) const { return host_of_[static_cast<size_t>(rank)] == own_host_; }
    [[nodiscard]] size_t world() const { return host_of_.size(); }
    // Whether the ranks of this host are consecutive in the communicator, so that their parts of a tensor are
    // contiguous.
    [[nodiscard]] bool is_contiguous() const;

    const int rank_;
    std::vector<size_t> host_of_;     // by rank: which of hosts_
    std::vector<Participant> hosts_;  // their leaders, in order
    size_t own_host_ = 0;
    std::unique_ptr<GlooTransport> wide_;       // of all ranks
    std::unique_ptr<shm::ShmTransport> local_;  // of this host's
    bool in_collective_ = false;                // of the issuing thread, like all below
    Clock::time_point last_look_ = Clock::now();
    std::shared_ptr<Buffer> chunks_;  // shared by the host, so that ranks reduce directly into their leader's memory
    std::vector<std::byte> parts_;
};

}  // namespace tsr::hierarchical
