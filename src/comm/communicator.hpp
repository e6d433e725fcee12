// The ranks of a group. Collectives run in issue order: a synchronous call on an empty queue runs on the caller's
// thread, an asynchronous one on the communicator's single progress thread. A collective that failed poisons the
// communicator: later calls throw ABORTED whose cause is the first error. One thread at a time may issue; abort(),
// error() and the getters may be called from any thread.
#pragma once

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

struct CommOptions {
    milliseconds timeout{600000};
    // How long a host that is waited for may give no sign of life (gloo/host_probe.hpp); 0: until the timeout.
    milliseconds heartbeat{30000};
    int spin_count = -1;  // -1: from ranks and usable cores
    std::string backend = "auto";
    std::string name = "world";
    std::string host_id;  // empty: that of the communicator which is split, else comm/host.hpp's
    std::shared_ptr<FlightRequests> flight_requests;  // that the communicator answers; none: nobody asks
    // Told of each failure, and of nullptr when a communicator was made: those before it are over. Must not throw. Empty:
    // nobody is told.
    std::function<void(const ErrorRecord*)> on_failure;
    bool bound = false;  // what is split with this is aborted when the one that it is split from is

    [[nodiscard]] static CommOptions from_environment();
};

// Memory of a communicator that its transport reaches without copies. Freed when the last holder lets go.
class Buffer {
   public:
    virtual ~Buffer() = default;
    [[nodiscard]] virtual std::byte* data() const = 0;
    [[nodiscard]] virtual size_t size() const = 0;
    // Another rank's part of the same allocation, as this process sees it; nullptr where no memory is shared. Who touches
    // what and when, the ranks settle by collectives.
    [[nodiscard]] virtual std::byte* of_rank(int /*rank*/) const { return nullptr; }
};

// A rank whose process has ended, as its launcher tells: "exited with status 0", "was killed by SIGKILL".
struct Departure {
    int rank = 0;
    std::string how;
};
// Empty: nobody tells.
using Departures = std::function<std::vector<Departure>()>;

class Communicator {
   public:
    // Collective over the store: returns when all `world_size` ranks have come. TIMEOUT names those missing, PEER_LOST at
    // once one of `departures` that has not joined.
    [[nodiscard]] static std::shared_ptr<Communicator> create(std::shared_ptr<Store> store, int rank, int world_size,
                                                              const CommOptions& options,
                                                              const Departures& departures = {});
    // One rank, no store.
    [[nodiscard]] static std::shared_ptr<Communicator> self();

    virtual ~Communicator() = default;

    [[nodiscard]] virtual int rank() const = 0;
    [[nodiscard]] virtual int world_size() const = 0;
    [[nodiscard]] virtual const std::string& name() const = 0;
    [[nodiscard]] virtual std::string_view transport() const = 0;
    // With the timeout as it is now.
    [[nodiscard]] virtual CommOptions options() const = 0;
    // Of operations that are issued from here on, by this rank alone. Any thread.
    virtual void set_timeout(milliseconds timeout) = 0;

    // Runs to the end, with the timeout of now. Tensors are checked here (INVALID_ARGUMENT names what is wrong).
    virtual void run(const Request& request) = 0;
    // Queues; the tensors' memory must live until the work is done, the spans only for the call.
    [[nodiscard]] virtual WorkPtr submit(const Request& request) = 0;
    // A collective to be launched again and again; the tensors' memory must live as long as the plan. Not collective.
    [[nodiscard]] virtual std::shared_ptr<Plan> prepare(const Request& request) = 0;
    // Queues `job` in the order of the collectives. It runs on the progress thread, where run() of this communicator
    // carries a collective out at once; what it throws poisons, as a collective that fails.
    [[nodiscard]] virtual WorkPtr submit_job(std::function<void()> job) = 0;
    // Runs `body`, whose calls on this communicator are one for other threads. What INVALID_STATE says of a call is thrown
    // before `body` is run, and of none of its calls then.
    virtual void in_one_call(FunctionRef<void()> body) { body(); }

    // Collective. color < 0: nullptr. What one rank alone cannot ask for, by its options, is an error of the same code on
    // all, which names the rank.
    [[nodiscard]] virtual std::shared_ptr<Communicator> split(int color, int key, const CommOptions& options) = 0;
    // Takes the place of split() on a rank whose options cannot even be read, and throws `why`.
    [[noreturn]] virtual void refuse_split(const Error& why) { throw Error(why); }
    // A communicator of the ranks that are left, in their order, after this one has failed: collective over those. This one
    // and all its memory are out of use. Waits, `options.timeout` at most, for ranks that are not known to be gone.
    [[nodiscard]] virtual std::shared_ptr<Communicator> shrink(const CommOptions& options) = 0;
    // Collective. Zeroed, aligned to 4096.
    [[nodiscard]] virtual std::shared_ptr<Buffer> allocate(size_t size) = 0;

    virtual void finalize() = 0;
    virtual void abort(const std::string& reason) = 0;
    // The last call of the owner, though others may still hold the communicator: aborts what is unfinished; later calls
    // throw INVALID_STATE.
    virtual void leave() {}
    [[nodiscard]] virtual std::optional<Error> error() const = 0;
    // The flight record of this rank (flight_recorder.hpp) so far, as a file of JSON lines. Any thread.
    virtual void write_trace(const std::string& path) const = 0;
};

}  // namespace tsr
