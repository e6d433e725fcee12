// Moves activations and gradients between the stages of a pipeline.
//
// Two stages are joined by an edge. What one micro-batch sends along an edge in one direction is a bundle: its tensors,
// in order. Stages on one rank hand bundles over by reference. Between ranks, each tensor is two messages on a
// communicator that nobody else uses: a header that describes it, then its bytes, in the order in which the sender
// computes. One receive is posted for each peer that still has bundles to send, so the order in which this rank
// computes never keeps a peer from sending: every order that respects the dependencies is free of deadlock.
//
// The trainer's thread sends and waits. The communicator's progress thread receives: a header's completion checks it,
// takes memory from the pool and posts the receive of the bytes. It is the only I/O thread; a second one would add a
// hand-over to every message. Nothing that a header says is used before it is checked.
#pragma once

#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fork_mark.hpp"
#include "base/function_ref.hpp"
#include "comm/communicator.hpp"
#include "parallel/pipeline/pool.hpp"
#include "tensor/tensor.hpp"

namespace tsr::pipeline {

enum class Kind : uint8_t { activation, gradient };

// Activations go from `from` to `to`, gradients back.
struct Route {
    int from_stage = 0;
    int to_stage = 0;
    int from_rank = 0;
    int to_rank = 0;
};

struct Held {
    Tensor tensor;
    std::shared_ptr<std::byte> memory;
};
using Bundle = std::vector<Held>;

// Names a bundle.
struct Parcel {
    Kind kind = Kind::activation;
    size_t edge = 0;
    int microbatch = 0;
};

enum class Pass : uint8_t { training, evaluation };

// Before each tensor; a bundle without tensors is one header with `count` 0.
struct MessageHeader {
    static constexpr uint64_t current_magic = 0x3130'5350'5052'5354;  // "TSRPPS01"
    uint64_t magic = current_magic;
    uint64_t step = 0;
    Pass pass = Pass::training;
    Kind kind = Kind::activation;
    std::array<uint8_t, 2> reserved{};
    uint32_t edge = 0;
    uint32_t microbatch = 0;
    uint32_t index = 0;  // of this tensor in the bundle
    uint32_t count = 0;  // of tensors in the bundle
    int32_t dtype = 0;
    int32_t ndim = 0;
    uint32_t reserved2 = 0;
    std::array<int64_t, max_ndim> shape{};
};
static_assert(sizeof(MessageHeader) == 112);

inline constexpr int header_tag = 1;
inline constexpr int bytes_tag = 2;
inline constexpr int tied_tag = 3;

inline constexpr size_t max_bundle_tensors = 1024;

class Messages {
   public:
    // `comm` is used by nobody else. `routes` are the same on every rank: one for each edge.
    Messages(std::shared_ptr<Communicator> comm, std::vector<Route> routes, int microbatches, uint64_t max_tensor_bytes,
             std::shared_ptr<Pool> pool);
    // Never waits for a peer: unfinished messages are aborted.
    ~Messages();
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;

    // Begins a pass: posts the receives.
    void begin(Pass pass, milliseconds timeout);
    // Keeps the bundle's memory until it is sent; waits while too many messages are on their way.
    void send(const Parcel& parcel, Bundle bundle);
    // Each bundle is taken once. Throws TIMEOUT, INTERRUPTED or the failure.
    [[nodiscard]] Bundle take(const Parcel& parcel);
    // Ends the pass: returns when all that was sent has left.
    void finish();

    // Runs `body`, whose calls on the communicator have the timeout of a single operation, between two passes.
    void between(milliseconds timeout, FunctionRef<void(Communicator&)> body);

    // Runs `body`, which the communicator's flight record shows beside the messages.
    void record(std::string_view label, FunctionRef<void()> body) { comm_->record(label, body); }

    // This rank gives up: tells the peers why, and ends their waits and its own. Thread-safe. The first failure counts.
    void fail(const Error& why);
    // The first failure of this rank or of one that it heard of.
    [[nodiscard]] std::optional<Error> failure() const;

    // "the activation of micro-batch 4 from stage 2 on rank 2"
    [[nodiscard]] std::string describe(const Parcel& parcel) const;
    [[nodiscard]] const Route& route(size_t edge) const { return routes_[edge]; }
    [[nodiscard]] int sender_of(const Parcel& parcel) const;
    [[nodiscard]] int receiver_of(const Parcel& parcel) const;

   private:
    // Where one bundle arrives.
    struct Slot {
        enum class State : uint8_t { awaited, partial, complete, taken };
        State state = State::awaited;
        uint32_t count = 0;
        Bundle bundle;
    };
    // A peer that sends to this rank. It has one receive at a time, whose completion owns it but for what mutex_ guards.
    struct Source {
        int rank = 0;
        std::array<size_t, 2> edges{};  // by kind, those along which it sends
        size_t bundles_left = 0;
        size_t not_taken = 0;  // bundles that have come; guarded by mutex_
        bool held = false;     // has no receive: too many have come; guarded by mutex_
        MessageHeader header;
        Held arriving;
    };
    struct Outgoing {
        MessageHeader header;
        Held held;
    };
    // Messages to a peer that are on their way, and the last one that was sent.
    struct Sends {
        size_t count = 0;
        Parcel last;
    };

    [[nodiscard]] int stage_that_takes(const Parcel& parcel) const;
    [[nodiscard]] Slot& slot(const Parcel& parcel);
    template <class Then>
    void submit(const Request& request, Then then);
    [[nodiscard]] bool is_far_ahead(const Source& source) const;
    // Lets those go on that may.
    void release_sources();
    void receive_header(Source& source);
    void header_came(Source& source);
    void tensor_came(Source& source);
    // Throw CORRUPT for a header that no rank sends, and MISMATCH for one that is not expected now.
    void check_header(const Source& source);
    [[nodiscard]] Tensor checked_tensor(const Source& source) const;
    void send_tensor(int peer, const MessageHeader& header, Held held);
    // Waits for `ready`; false if the time passes first. Throws INTERRUPTED, or the failure with what it ended.
    bool wait(std::unique_lock<std::mutex>& lock, milliseconds time, FunctionRef<bool()> ready,
              FunctionRef<std::string()> what);
    bool wait_until_ready(std::unique_lock<std::mutex>& lock, Deadline deadline, FunctionRef<bool()> ready,
                          FunctionRef<std::string()> what);
    [[nodiscard]] static Error ended(const std::string& what, const Error& cause);
    [[nodiscard]] Error timed_out(const std::string& what, int peer) const;
    void note(const Error& error);

    const std::vector<Route> routes_;
    const int microbatches_;
    const uint64_t max_tensor_bytes_;
    const std::shared_ptr<Pool> pool_;
    const int rank_;
    std::vector<Source> sources_;
    uint64_t step_ = 0;
    Pass pass_ = Pass::training;
    milliseconds timeout_{0};
    const ForkMark fork_;

    mutable std::mutex mutex_;  // guards all below
    std::condition_variable changed_;
    std::array<std::vector<std::vector<Slot>>, 2> slots_;  // by kind, edge and micro-batch; empty where none arrives
    std::map<int, Sends> sends_;                           // by peer
    const FunctionRef<bool()>* awaited_ = nullptr;         // by the trainer's thread, in wait()
    size_t in_flight_ = 0;                                 // sends and receives whose callback has not returned
    std::optional<Error> failure_;

    std::shared_ptr<Communicator> comm_;
};

}  // namespace tsr::pipeline
