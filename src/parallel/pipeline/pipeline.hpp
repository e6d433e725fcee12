// Pipeline-parallel training: the model is cut into stages, each rank has some of them, and a batch passes through them
// in micro-batches. The trainer computes: a schedule says in which order, and the pipeline calls the trainer's
// callbacks in that order, moves activations and gradients between the stages, and keeps what a backward needs.
//
//     step:  for each action of this rank's order
//                F    activations of the previous stage -> callback -> activations for the next
//                B/I  gradients of the next stage       -> callback -> gradients for the previous
//                W    what I kept                       -> callback
//            then the losses of all micro-batches go to every rank
//
// Invariants: a tensor's memory is valid from the forward that gets or makes it until the B or W of its micro-batch has
// returned. Every rank fails when one does: the first error ends the pipeline on all of them, and its message names the
// stage and the micro-batch.
//
// On a device, callbacks put their work on the trainer's stream and return. The host runs through the schedule ahead of the
// device; what it hands over, keeps and uses again is in the order of streams.
//
// Owned by one thread, on which the callbacks run; messages.hpp has what moves bytes.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"
#include "base/reentry.hpp"
#include "comm/communicator.hpp"
#include "parallel/pipeline/messages.hpp"
#include "parallel/pipeline/placement.hpp"
#include "parallel/pipeline/pool.hpp"
#include "parallel/pipeline/schedule.hpp"

namespace tsr::pipeline {

struct PipelineOptions {
    std::string schedule = "1f1b";                   // a name of schedule_names()
    std::string schedule_csv;                        // instead of a name, as from_csv() reads it
    int microbatches = 0;                            // 0: as many as the CSV has
    std::vector<Edge> edges;                         // besides those to the next stage
    uint64_t max_message_bytes = uint64_t{1} << 30;  // of a tensor between two stages
    bool on_device = false;                          // the communicator's, where these are; else on the CPU
};

// What a callback computes with. The lists are borrowed for the call, the memory of their tensors until the B or W of
// the micro-batch has returned, that of input_grads for the call.
struct StageCall {
    Work work = Work::forward;
    int stage = 0;
    int microbatch = 0;
    int microbatches = 0;
    bool training = false;          // a step, so that a backward follows
    bool is_last_backward = false;  // the weights' gradients of this stage are complete after it
    double weight = 0;              // the factor of this micro-batch's loss; on the last stage only
    // Of stage 0, rows of the batch; of others, what earlier stages sent: the previous one first, then each edge.
    std::span<const Tensor> inputs;
    std::span<const Tensor> targets;  // of the last stage
    std::span<const Tensor> outputs;  // made by the forward; empty in it
    // In a backward: of the outputs that go to the next stage, then of each edge that leaves this stage. Tensors
    // without a gradient, which are those not of floating point, have no data.
    std::span<const Tensor> output_grads;
    std::span<const Tensor> input_grads;  // in B and I: zeros, to be written; empty on stage 0
};
using Callback = std::function<void(const StageCall& call)>;  // throws to fail the step on every rank

struct Callbacks {
    Callback forward;
    Callback backward;
    Callback backward_input;  // these two only for schedules that split the backward
    Callback backward_weight;
};

// One rank's part of a step's arguments. What belongs to a stage that this rank does not have is ignored.
struct Batch {
    std::span<const Tensor> inputs;   // of stage 0; may be empty if its callback brings its own
    std::span<const Tensor> targets;  // of the last stage; likewise
    std::span<const double> weights;  // of the last stage; empty: shares of the targets' rows, so that means stay means
};

// Of the last pass on this rank.
struct PipelineStats {
    std::chrono::nanoseconds wall{};
    std::chrono::nanoseconds busy{};    // in callbacks
    std::chrono::nanoseconds waited{};  // for messages and for the other ranks
    // The stage for whose messages this rank waited longest, and how long; -1 if for none.
    int longest_stage = -1;
    int longest_rank = -1;
    std::chrono::nanoseconds longest{};
    size_t peak_activations = 0;  // micro-batches of a stage between F and B or W
    size_t peak_bytes = 0;        // of the tensors in the library's memory
};

class Pipeline {
   public:
    // Collective. Every rank names its stages; together they are 0 to S - 1, where the schedule puts them.
    Pipeline(const std::shared_ptr<Communicator>& comm, const std::vector<int>& stages, const PipelineOptions& options,
             Callbacks callbacks);
    ~Pipeline();
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;

    // Collective: one batch forward and backward; forward only. Returns the loss of each micro-batch as the last stage
    // reported it, NaN if it did not, valid until the next call.
    std::span<const double> step(const Batch& batch);
    std::span<const double> eval(const Batch& batch);

    // On a device, all work of callbacks is on this stream from now on, after what was on the former one, which may be gone.
    // Throws INVALID_ARGUMENT for another device's, or on the CPU, which has none.
    void set_stream(StreamHandle stream);

    // In a forward callback: memory for its next output. The reference is valid until the callback returns.
    const Tensor& output(DType dtype, const Dims& shape);
    // In a callback of the last stage: the micro-batch's loss, without its weight.
    void loss(double value);

    // Collective over the ranks that have `stages`, after a step: replaces the gradient of a parameter that these
    // stages share by the sum of all ranks, added in the order of the stages.
    void sum_tied(const Tensor& gradient, std::span<const int> stages);

    // Call instead of the others on a rank whose arguments cannot even be read; throws `why`, and the others learn of
    // it.
    [[noreturn]] void refuse(const Error& why);

    // Of the last pass. INVALID_STATE is thrown in a callback.
    [[nodiscard]] PipelineStats stats() const;
    [[nodiscard]] const Schedule& schedule() const { return schedule_; }
    [[nodiscard]] bool has_stage(int stage) const { return stages_.contains(stage); }

   private:
    // A micro-batch of a stage, from its F to its B or W.
    struct Cell {
        std::vector<Tensor> inputs;
        std::vector<size_t> inputs_of_edge;  // how many came along each edge
        std::vector<Tensor> targets;
        std::vector<Tensor> outputs;
        std::vector<Tensor> output_grads;
        std::vector<std::shared_ptr<std::byte>> memory;
    };
    struct Stage {
        std::vector<size_t> from;  // the edges along which inputs come
        std::vector<size_t> to;    // the edges, besides that to the next stage, along which outputs go
        size_t last_backward = 0;  // its index in the order
    };

    void agree(Communicator& comm, const std::vector<int>& stages, const PipelineOptions& options);
    void join_stages();
    std::span<const double> run(Pass pass, const Batch& batch);
    void begin(Pass pass, const Batch& batch);
    void compute(size_t index);
    void forward(const Action& action);
    void backward(const Action& action, bool is_last);
    void backward_weight(const Action& action, bool is_last);
    void call(StageCall what, const Cell& cell, const Callback& callback);
    void send_outputs(const Action& action);
    // Adds the gradients of `outputs`, in order.
    void take_gradients(const Parcel& parcel, std::span<const Tensor> outputs, Cell& cell);
    [[nodiscard]] Bundle take(const Parcel& parcel);
    [[nodiscard]] Held make(DType dtype, const Dims& shape);
    // What a micro-batch kept goes back to the pool.
    void release(std::map<std::pair<int, int>, Cell>::iterator cell);
    void check_place(const Tensor& tensor, const std::string& name) const;
    void check_places(std::span<const Tensor> tensors, std::string_view what) const;
    // What the trainer's stream has now.
    void mark_stream();
    [[nodiscard]] size_t output_of(size_t edge) const {
        return static_cast<size_t>(edges_[edge - (static_cast<size_t>(schedule_.stages()) - 1)].output);
    }
    [[nodiscard]] bool goes_to_next(const Stage& stage, size_t output) const {
        return std::ranges::none_of(stage.to, [&](size_t edge) { return output_of(edge) == output; });
    }
    void share_losses(Pass pass);
    void check_tied(const Tensor& gradient, std::span<const int> stages) const;
    // Of `ranks`, in this order.
    void sum_on_host(const Tensor& gradient, const std::vector<int>& ranks);
    void sum_of_device(const Tensor& gradient, const std::vector<int>& ranks);
    // Runs a collective call of this object; its first failure is the last thing that works here.
    void in_step(FunctionRef<void()> body);
    [[nodiscard]] Reentry enter() const { return {this, "the pipeline of communicator", comm_->name()}; }
    [[nodiscard]] bool is_on_device() const { return device_.type != DeviceType::cpu; }
    [[nodiscard]] bool is_last_stage(int stage) const { return stage + 1 == schedule_.stages(); }

    const std::shared_ptr<Communicator> comm_;
    const Callbacks callbacks_;
    const std::vector<Edge> edges_;
    const uint64_t max_message_bytes_;
    const int rank_;
    const Device device_;
    DeviceApi& api_;  // of it
    const std::shared_ptr<Pool> pool_;
    const std::shared_ptr<Pool> on_host_;  // the same on the CPU
    Schedule schedule_;
    std::map<int, Stage> stages_;  // this rank's
    std::unique_ptr<Messages> messages_;
    std::optional<Error> failed_;
    StreamHandle stream_ = nullptr;      // the trainer's
    EventPtr point_;                     // what it had after the last callback; null on the CPU
    std::shared_ptr<std::byte> pinned_;  // for gradients of a device that are summed
    size_t pinned_size_ = 0;

    // Of the pass that goes on.
    Batch batch_;
    bool training_ = false;
    std::vector<double> weights_;
    std::vector<double> losses_;
    std::map<std::pair<int, int>, Cell> live_;       // by stage and micro-batch
    const StageCall* current_ = nullptr;             // the callback that runs
    std::deque<Held> made_;                          // its outputs so far
    std::map<int, std::chrono::nanoseconds> waits_;  // by the stage that was awaited
    PipelineStats stats_;
};

}  // namespace tsr::pipeline
