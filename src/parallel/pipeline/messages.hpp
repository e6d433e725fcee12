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
//
// Tensors on devices take lanes beside the headers (device_lanes.hpp). Nobody waits for the device: a bundle has come when
// its receives are on their lane, and take() makes the trainer's stream wait for them. What was sent returns to the pool once
// the peer's receive is on the peer's lane, which later headers of the peer tell, or when it is done: whoever takes the memory
// again waits for the send on the device, and so never for a receive that might come after.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fork_mark.hpp"
#include "base/function_ref.hpp"
#include "comm/communicator.hpp"
#include "parallel/pipeline/device_lanes.hpp"
#include "parallel/pipeline/pool.hpp"
#include "tensor/tensor.hpp"

namespace tsr::pipeline {

enum class Kind : uint8_t { activation, gradient };
[[nodiscard]] inline std::string_view name_of(Kind kind) {
    return kind == Kind::activation ? "activation" : "gradient";
}

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
    uint64_t received = 0;  // tensors of the receiver's on lanes, so far, whose receives the sender has launched
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
static_assert(sizeof(MessageHeader) == 120);
[[nodiscard]] inline Parcel parcel_of(const MessageHeader& header) {
    return {header.kind, header.edge, static_cast<int>(header.microbatch)};
}

inline constexpr int header_tag = 1;
inline constexpr int bytes_tag = 2;
inline constexpr int tied_tag = 3;

inline constexpr size_t max_bundle_tensors = 1024;

class Messages {
   public:
    // `comm` is used by nobody else. `routes` are the same on every rank: one for each edge. `lanes` are those of the routes,
    // null for tensors on the CPU.
    Messages(std::shared_ptr<Communicator> comm, std::vector<Route> routes, int microbatches, uint64_t max_tensor_bytes,
             std::shared_ptr<Pool> pool, std::unique_ptr<DeviceLanes> lanes = nullptr);
    // Never waits for a peer's trainer: unfinished messages are aborted. What is on lanes ends first.
    ~Messages();
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;

    // Begins a pass: posts the receives. Throws what has failed on a lane since the last one.
    void begin(Pass pass, milliseconds timeout);
    // Keeps the bundle's memory until it is sent; waits while too many messages are on their way. On a device, `written` is when
    // the tensors are.
    void send(const Parcel& parcel, Bundle bundle, const EventPtr& written = nullptr);
    // Each bundle is taken once. On a device, what the stream gets later sees the tensors. Throws TIMEOUT, INTERRUPTED or the
    // failure.
    [[nodiscard]] Bundle take(const Parcel& parcel, StreamHandle stream = nullptr);
    // Ends the pass: returns when all that was sent has left, but for what is on lanes.
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
        EventPtr received;  // on a lane, the last tensor
    };
    // A peer that sends to this rank. It has one receive at a time, whose completion owns it but for what mutex_ guards.
    struct Source {
        int rank = 0;
        std::array<size_t, 2> edges{};  // by kind, those along which it sends
        size_t bundles_left = 0;
        size_t not_taken = 0;   // bundles that have come; guarded by mutex_
        bool held = false;      // has no receive: too many have come; guarded by mutex_
        uint64_t launched = 0;  // receives on the lane; guarded by mutex_
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
        uint64_t launched = 0;                          // on the lane, of which these
        std::deque<std::pair<uint64_t, Held>> on_lane;  // may not have a receive yet, in order
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
    void send_tensor(int peer, const MessageHeader& header, Held held, const EventPtr& written);
    [[nodiscard]] milliseconds grace_of(const Parcel& parcel) const;
    [[nodiscard]] milliseconds longest_grace() const;
    // --- messages_on_device.cc
    [[nodiscard]] uint64_t prepare_for_lane(int peer, MessageHeader& header, const Held& held);
    void send_on_lane(const Parcel& parcel, uint64_t number, const Held& held, const EventPtr& written);
    void receive_on_lane(Source& source);
    template <class Then>
    void move_on_lane(const Parcel& parcel, Direction direction, const Tensor& tensor, std::vector<EventPtr> before,
                      Then then);
    [[nodiscard]] bool is_of_another(const Error& error) const;
    [[nodiscard]] static bool is_first(const Error& error);
    void fail_first(const Error& cause);  // nothing that is known failed before
    void release_sent(int peer, uint64_t received);
    [[nodiscard]] Error failed_on_lane(const Parcel& parcel, const std::vector<EventPtr>& before,
                                       const Error& error) const;
    // --- messages.cc
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
    size_t on_lanes_ = 0;                                  // the same on lanes, which are not among those
    std::optional<Error> failing_;                         // of which this rank tells the peers
    std::optional<Error> failure_;

    std::shared_ptr<Communicator> comm_;
    const std::unique_ptr<DeviceLanes> lanes_;
};

}  // namespace tsr::pipeline
