// What carries the bytes of one communicator: the interface that shm, gloo, hierarchical and self implement. The communicator above
// validates requests, keeps the issue order and the poison; a transport only moves data, watches its peers and keeps
// deadlines. Threads: run, start, advance, wait and allocate are called by one thread at a time (the issuer or the
// progress thread); abort, leave, peer_error and wake by any thread at any time.
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

// A send or recv in progress. Several may be in progress at once; those of one pair of ranks and one tag match in the
// order in which they were started. A transfer is destroyed before its transport, done or not.
class Transfer {
   public:
    enum class Progress { stuck, moved, done };
    virtual ~Transfer() = default;
    // Moves what can be moved now; never blocks. Throws MISMATCH, or TIMEOUT once its deadline has passed.
    virtual Progress advance() = 0;
};

class Transport {
   public:
    virtual ~Transport() = default;
    [[nodiscard]] virtual std::string_view name() const = 0;

    // Runs a validated collective to its end. `operation` is what this rank tells its peers, who compare: operation_of() of
    // the request or, if that is a step of another collective, of the whole. `sequence` counts collectives and is the same
    // on every rank. Throws MISMATCH, TIMEOUT, PEER_LOST, ABORTED or INTERRUPTED; the transport is not used for another operation after that.
    virtual void run(const Request& request, const Operation& operation, uint64_t sequence, milliseconds timeout) = 0;

    // Begins a validated send or recv. `sequence` counts this rank's transfers.
    [[nodiscard]] virtual std::unique_ptr<Transfer> start(const Request& request, uint64_t sequence,
                                                          Deadline deadline) = 0;
    // Returns when a started transfer may be able to move, `woken` is true or a poll slice has passed. Throws
    // PEER_LOST, ABORTED or INTERRUPTED.
    virtual void wait(std::span<Transfer* const> transfers, const std::atomic<bool>& woken) = 0;
    // Ends a wait() of another thread, which has set `woken` before.
    virtual void wake() = 0;

    // Collective, in order with run(); see Communicator::allocate.
    [[nodiscard]] virtual std::shared_ptr<Buffer> allocate(size_t size, uint64_t sequence, milliseconds timeout) = 0;

    // This rank has failed, or gives up: ends what waits in this transport, and tells the peers, whose waits end too.
    // Idempotent; the first error counts.
    virtual void abort(const Error& error) = 0;
    // This rank issues nothing any more, though its objects may live on: peers that wait for it may know.
    virtual void leave() {}
    // What has become of the peers, without waiting: a death or a failure that one of them told.
    [[nodiscard]] virtual std::optional<Error> peer_error() const = 0;
    // Ranks that will do nothing more with this transport, as far as is known: they died, left, or cannot be reached.
    [[nodiscard]] virtual std::vector<int> departed() const = 0;

    // What rank `rank` does here, as far as can be seen: "waits in barrier #3", "has failed in recv #1 (...)"; empty: nothing.
    [[nodiscard]] virtual std::string doing(int /*rank*/) const { return {}; }
    // Asked about a rank that is late, for the message: what it does in another communicator. Set before the first operation.
    virtual void ask_elsewhere(std::function<std::string(int rank)> /*ask*/) {}
};

// Each is collective over the ranks of `peers`, which are in rank order and include this rank; `rank` is this rank's place
// among them.
[[nodiscard]] std::unique_ptr<Transport> make_self_transport();
[[nodiscard]] std::unique_ptr<Transport> make_shm_transport(Bootstrap bootstrap);
[[nodiscard]] std::unique_ptr<Transport> make_gloo_transport(Bootstrap bootstrap);
[[nodiscard]] std::unique_ptr<Transport> make_hierarchical_transport(Bootstrap bootstrap);

}  // namespace tsr
