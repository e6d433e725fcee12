// A group of ranks and its collectives. Collectives run in issue order: a synchronous call on an empty queue runs on
// the caller's thread, an asynchronous one on the communicator's single progress thread. A failed collective poisons
// the communicator: later calls throw ABORTED with the first error as the cause. One thread at a time may issue
// operations; abort(), error() and the getters are safe to call from any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/function_ref.hpp"
#include "comm/request.hpp"
#include "comm/work.hpp"
#include "store/store.hpp"

namespace tsr {

class FlightRequests;
class Plan;

constexpr int max_world_size = 4096;
// Operations end by themselves at the communicator's timeout. Who waits for them gives up this much later.
inline constexpr milliseconds after_timeout{10000};

struct CommOptions {
    milliseconds timeout{600000};
    // How long a host may stay unresponsive while a rank waits for it (gloo/host_probe.hpp); 0: until the timeout.
    milliseconds heartbeat{30000};
    int spin_count = -1;  // -1: chosen from the numbers of ranks and usable cores
    std::string backend = "auto";
    int device = -1;  // the CUDA device that this rank communicates from; -1: by its place among the ranks of its host
    std::string name = "world";
    std::string host_id;                              // empty: the parent's in a split, else the one of comm/host.hpp
    std::shared_ptr<FlightRequests> flight_requests;  // requests that the communicator answers; may be null
    // Called with each failure, and with nullptr once a communicator is created, which ends earlier failures. Must not
    // throw. May be empty.
    std::function<void(const ErrorRecord*)> on_failure;
    bool bound = false;  // a communicator split with this option is aborted together with its parent

    [[nodiscard]] static CommOptions from_environment();
};

// Memory of a communicator that its transport reaches without copies. Freed with its last reference.
class Buffer {
   public:
    virtual ~Buffer() = default;
    [[nodiscard]] virtual std::byte* data() const = 0;
    [[nodiscard]] virtual size_t size() const = 0;
    // Another rank's part of the same allocation, mapped into this process; nullptr where no memory is shared. The
    // ranks synchronize their accesses through collectives.
    [[nodiscard]] virtual std::byte* of_rank(int /*rank*/) const { return nullptr; }
};

// A rank whose process has ended, in the launcher's words: "exited with status 0", "was killed by SIGKILL".
struct Departure {
    int rank = 0;
    std::string how;
};
// Returns the ranks that have ended. May be empty.
using Departures = std::function<std::vector<Departure>()>;

class Communicator {
   public:
    // Collective over the store: returns when all `world_size` ranks have joined. Throws TIMEOUT naming the missing
    // ranks, and PEER_LOST at once when one of `departures` has not joined.
    [[nodiscard]] static std::shared_ptr<Communicator> create(std::shared_ptr<Store> store, int rank, int world_size,
                                                              const CommOptions& options,
                                                              const Departures& departures = {});
    // One rank, no store.
    [[nodiscard]] static std::shared_ptr<Communicator> self();

    virtual ~Communicator() = default;

    [[nodiscard]] virtual int rank() const = 0;
    [[nodiscard]] virtual int world_size() const = 0;
    [[nodiscard]] virtual int launcher_rank(int /*rank*/) const { return -1; }  // the launcher's number; -1: unknown
    [[nodiscard]] virtual const std::string& name() const = 0;
    [[nodiscard]] virtual std::string_view transport() const = 0;
    // Where tensors may be besides on the CPU, if anywhere.
    [[nodiscard]] virtual std::optional<Device> device() const { return std::nullopt; }
    // With the current timeout.
    [[nodiscard]] virtual CommOptions options() const = 0;
    // Applies to operations issued from now on, on this rank only. Any thread.
    virtual void set_timeout(milliseconds timeout) = 0;

    // Runs the operation to completion, with the current timeout. Validates the tensors (INVALID_ARGUMENT names the
    // fault).
    virtual void run(const Request& request) = 0;
    // run(); the work is finished when the operation is, which on a device is later. Also in a job.
    virtual WorkPtr run_tracked(const Request& request);
    // Work of all that a stream of device() has now: it is finished when the device has done that, or with this
    // communicator. Then a thread of the communicator calls `verify`, unless it is empty; what that throws ends the
    // communicator. Not collective. `label` is for messages.
    virtual WorkPtr track(void* stream, std::string_view label, std::function<void()> verify);
    // Queues the operation. The tensors' memory must live until the work is done, the spans only for the call.
    [[nodiscard]] virtual WorkPtr submit(const Request& request) = 0;
    // A collective that can be launched repeatedly. The tensors' memory must live as long as the plan. Not collective.
    [[nodiscard]] virtual std::shared_ptr<Plan> prepare(const Request& request) = 0;
    // Queues `job` in order with the collectives. It runs on the progress thread, where run() of this communicator
    // executes at once. An exception of the job poisons the communicator like a failed collective.
    [[nodiscard]] virtual WorkPtr submit_job(std::function<void()> job) = 0;
    // Runs `body`, whose calls on this communicator count as a single call for other threads. INVALID_STATE is thrown
    // before `body` runs, and not by the calls inside it.
    virtual void in_one_call(FunctionRef<void()> body) { body(); }

    // A turn of rank `rank` (turn.hpp). Until end_turn(), operations of anything else throw INVALID_STATE, and so does another
    // begin_turn(). Not collective.
    void begin_turn(int rank);
    void end_turn() { turn_of_.store(-1, std::memory_order_relaxed); }
    // For what needs the other ranks on other communicators: throws INVALID_STATE in a turn, in which they wait. `what`: "a
    // save".
    virtual void refuse_in_turn(std::string_view /*what*/) const {}
    // What another rank does in a relative of this communicator, as this rank sees it: "waits in barrier #3 of communicator
    // 'dp'"; empty if unknown.
    [[nodiscard]] virtual std::string doing_elsewhere(int /*rank*/) const { return {}; }

    // Collective. Returns nullptr for color < 0. Invalid options of one rank fail on all ranks with the same code; the
    // error names that rank.
    [[nodiscard]] virtual std::shared_ptr<Communicator> split(int color, int key, const CommOptions& options) = 0;
    // Call instead of split() on a rank whose options cannot even be read; throws `why`.
    [[noreturn]] virtual void refuse_split(const Error& why) { throw Error(why); }
    // After this communicator has failed: a new one of the surviving ranks, in their order. Collective over those. This
    // communicator and all its memory become unusable. Waits up to `options.timeout` for ranks not known to be gone.
    [[nodiscard]] virtual std::shared_ptr<Communicator> shrink(const CommOptions& options) = 0;
    // Collective. `size` bytes per rank, zeroed, aligned to 4096.
    [[nodiscard]] virtual std::shared_ptr<Buffer> allocate(size_t size) = 0;

    virtual void finalize() = 0;
    virtual void abort(const std::string& reason) = 0;
    // The owner's last call; others may still hold references. Aborts unfinished work; later calls throw INVALID_STATE.
    virtual void leave() {}
    // Throws what an operation would that begins now: ABORTED after a failure, INVALID_STATE after finalize() and leave().
    virtual void check_usable() const {}
    [[nodiscard]] virtual std::optional<Error> error() const = 0;
    // Runs `body`, which the flight record shows beside the operations. Any thread.
    virtual void record(std::string_view /*label*/, FunctionRef<void()> body) { body(); }
    // Writes this rank's flight record so far (flight_recorder.hpp) to a file of JSON lines. Any thread.
    virtual void write_trace(const std::string& path) const = 0;

   protected:
    // The rank whose turn it is; -1: none.
    [[nodiscard]] int turn_of() const { return turn_of_.load(std::memory_order_relaxed); }

   private:
    std::atomic<int> turn_of_{-1};
};

}  // namespace tsr
