// Moves the bytes of one communicator: the interface that shm, gloo, hierarchical and self implement. The communicator
// above validates requests and keeps the issue order and the poisoned state; a transport only moves data, watches its
// peers and enforces deadlines. Threads: run, start, advance, wait and allocate are called by one thread at a time (the
// issuer or the progress thread); abort, leave, peer_error and wake by any thread at any time.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "comm/rendezvous.hpp"
#include "comm/request.hpp"

namespace tsr {

// A send or recv in progress. Several may be in progress at once; those with the same pair of ranks and tag match in
// the order in which they were started. A transfer must be destroyed before its transport, done or not.
class Transfer {
   public:
    enum class Progress { stuck, moved, done };
    virtual ~Transfer() = default;
    // Moves as much as possible without blocking. Throws MISMATCH, or TIMEOUT once its deadline has passed.
    virtual Progress advance() = 0;
};

class Transport {
   public:
    virtual ~Transport() = default;
    [[nodiscard]] virtual std::string_view name() const = 0;

    // Runs a validated collective to completion. `operation` is announced to the peers, which compare it:
    // operation_of() the request or, if the request is a step of another collective, of that collective. `sequence`
    // counts collectives and is the same on every rank. Throws MISMATCH, TIMEOUT, PEER_LOST, ABORTED or INTERRUPTED;
    // after that the transport must not be used for another operation.
    virtual void run(const Request& request, const Operation& operation, uint64_t sequence, milliseconds timeout) = 0;

    // Begins a validated send or recv. `sequence` counts this rank's transfers.
    [[nodiscard]] virtual std::unique_ptr<Transfer> start(const Request& request, uint64_t sequence,
                                                          Deadline deadline) = 0;
    // Returns when a started transfer may be able to make progress, when `woken` is true, or after a poll slice. Throws
    // PEER_LOST, ABORTED or INTERRUPTED.
    virtual void wait(std::span<Transfer* const> transfers, const std::atomic<bool>& woken) = 0;
    // Ends a wait() of another thread. Set its `woken` first.
    virtual void wake() = 0;

    // Collective, in order with run(); see Communicator::allocate.
    [[nodiscard]] virtual std::shared_ptr<Buffer> allocate(size_t size, uint64_t sequence, milliseconds timeout) = 0;

    // This rank has failed or gives up: ends all waits in this transport and notifies the peers, whose waits end too.
    // Idempotent; the first error counts.
    virtual void abort(const Error& error) = 0;
    // This rank will issue nothing more, though its objects may live on. Notifies peers that wait for it. `launched`: the number
    // of the last collective on a device that it took part in; 0: none.
    virtual void leave(uint64_t /*launched*/) {}
    // The death or reported failure of a peer, if known, without waiting.
    [[nodiscard]] virtual std::optional<Error> peer_error() const = 0;
    // Of a collective on a device, which the transport of devices carries: the error if a peer is known not to take part, because
    // it has left or is in another operation instead. Any thread.
    [[nodiscard]] virtual std::optional<Error> absent_from(const Operation& /*operation*/,
                                                           uint64_t /*sequence*/) const {
        return std::nullopt;
    }
    // Ranks known to do nothing more with this transport: they died, left, or cannot be reached.
    [[nodiscard]] virtual std::vector<int> departed() const = 0;

    // What rank `rank` is doing here, if visible: "waits in barrier #3", "has failed in recv #1 (...)"; empty if
    // unknown.
    [[nodiscard]] virtual std::string doing(int /*rank*/) const { return {}; }
    // `ask` tells, for messages, what a late rank does in another communicator. Set it before the first operation.
    virtual void ask_elsewhere(std::function<std::string(int rank)> /*ask*/) {}
};

// Each is collective over the ranks of `bootstrap.peers`, which are in rank order and include this rank, at index
// `bootstrap.rank`.
[[nodiscard]] std::unique_ptr<Transport> make_self_transport();
[[nodiscard]] std::unique_ptr<Transport> make_shm_transport(Bootstrap bootstrap);
[[nodiscard]] std::unique_ptr<Transport> make_gloo_transport(Bootstrap bootstrap);
[[nodiscard]] std::unique_ptr<Transport> make_hierarchical_transport(Bootstrap bootstrap);

}  // namespace tsr
