// Data-parallel training: every rank holds the full model, and gradients are averaged in buckets during the trainer's
// backward pass. The trainer writes gradients into views of the buckets and marks them ready in any order. Buckets are
// launched strictly in their own order, so that all ranks issue the same collectives. The Reducer handles full buckets.
//
// A step:   idle --ready--> reducing --wait--> idle        after a failed collective: failed, permanently
//
// Issued in a synchronised step, the same on every rank:
//
//     [ranks with data left] bucket 0, 1, ... [used parameters] [order of arrival, after the first step]
//
// On a device, a bucket's job launches its reduction and wait() lets the trainer's stream wait for it (device_grads.hpp). What
// ranks tell each other (order, used parameters, announcements) stays on the CPU.
//
// Gradients stay where the first plan put them for the life of the object. A rebuild only regroups them: a bucket is
// then a list of ranges of that memory.
//
// Owned by one thread; the reductions run on the communicator's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"
#include "base/meter.hpp"
#include "comm/communicator.hpp"
#include "optim/optimizer.hpp"
#include "parallel/ddp/backward_step.hpp"
#include "parallel/ddp/bucket_plan.hpp"
#include "parallel/ddp/host_copy.hpp"
#include "parallel/ddp/reducer.hpp"
#include "parallel/ddp/shared_step.hpp"
#include "parallel/params.hpp"

namespace tsr {

// Statistics of the last synchronised step. Times are relative to its first ready(); they are zero before the first
// step and after a step that regrouped the buckets.
struct BucketStats {
    size_t size_bytes = 0;
    size_t params = 0;
    std::chrono::nanoseconds ready{};    // its last gradient was ready
    std::chrono::nanoseconds start{};    // its reduction began
    std::chrono::nanoseconds end{};      // its reduction was done
    std::chrono::nanoseconds exposed{};  // how long wait() waited for it
};

class TensorParallel;

class Ddp {
   public:
    // Collective: checks that all ranks register the same parameters and copies rank 0's values to every rank. The
    // tensors' memory must outlive this object, unless the ranks of a host share the parameters, which then have their
    // own memory. `slices`: the tensor-parallel model whose slices the parameters are, if any.
    Ddp(std::shared_ptr<Communicator> comm, std::vector<NamedTensor> params, const DdpOptions& options,
        std::shared_ptr<TensorParallel> slices = nullptr);
    ~Ddp();
    Ddp(const Ddp&) = delete;
    Ddp& operator=(const Ddp&) = delete;

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return comm_; }
    // Names have no wrapper prefixes.
    [[nodiscard]] const std::vector<NamedTensor>& params() const { return params_; }
    [[nodiscard]] const NamedTensor& param(size_t index) const;
    [[nodiscard]] const Tensor& grad(size_t index) const;
    // The tensor-parallel model whose slices the parameters are, and where a slice lies; none: whole parameters.
    [[nodiscard]] const std::shared_ptr<TensorParallel>& slices() const { return slices_; }
    [[nodiscard]] std::optional<Held> held(size_t index) const;
    [[nodiscard]] const std::vector<Bucket>& buckets() const { return buckets_; }

    void ready(size_t index);
    void ready_all();
    void wait();
    void zero_grad();
    // Between steps: the stream on which the trainer writes gradients and uses the reduced ones. nullptr, as at first: the device's
    // default stream, and the only one of the CPU.
    void set_stream(StreamHandle stream);

    // Between steps: sets whether the following steps reduce gradients or leave each rank its own.
    void set_sync(bool sync);
    // With the option `compares`: a number that all ranks should have alike in the next synchronised step. It travels with a
    // bucket, as no message of its own.
    void compare(uint64_t number) { compared_ = number; }
    // Whether they had in the last one: the same answer on every rank.
    [[nodiscard]] bool ranks_agreed() const { return ranks_agreed_; }
    // Whether any rank had a gradient of `index` in the last synchronised step.
    [[nodiscard]] bool used(size_t index) const;
    // On a device, waits for the step.
    [[nodiscard]] const BucketStats& stats(size_t bucket);
    // Between steps, the same on all ranks: sets what reduces a bucket from now on; empty: the option `hook`.
    void set_hook(BucketHook hook);
    // Between steps: lets `optimizer`, which was created from this model, update the parameters of a bucket as soon as
    // it is reduced; its own step() is then refused. Call forget_optimizer before any optimizer of this model is
    // destroyed, on any thread, at any time.
    void step_in_backward(Optimizer& optimizer);
    void forget_optimizer(const Optimizer& ending);
    // The copy that the ranks of this host share; nullptr if each rank has its own parameters. With a shared copy, an
    // optimizer of the model keeps its moments there too and steps in backward.
    [[nodiscard]] std::shared_ptr<HostCopy> host_copy() const;
    // HostCopy::step, between steps or after one that failed.
    [[nodiscard]] int64_t shared_step() const;

    // Collective, once per model: checks that all ranks register the same buffers and copies rank 0's values to every
    // rank.
    void register_buffers(const std::vector<NamedTensor>& buffers) {
        register_buffers([&] { return buffers; });
    }
    // An error thrown by `make` is also an error on all ranks.
    void register_buffers(const std::function<std::vector<NamedTensor>()>& make);
    // Collective: copies the values of rank 0, or of the lowest rank that has not joined, to all ranks.
    void broadcast_buffers();

    // Collective with the steps and broadcasts of the ranks that have data left: joins them with zeros until all ranks
    // have joined.
    void join(bool sync_params);

    // Throws INVALID_STATE if gradients are being reduced or their reduction failed; `what` begins the message.
    void check_idle(const char* what) const;
    // The number of synchronised steps.
    [[nodiscard]] int64_t synced_steps() const { return synced_steps_; }
    // Like check_idle(); also throws if synced_steps() is still `steps`, unless synchronisation is off.
    void check_reduced_after(int64_t steps) const;

   private:
    // The role of a rank in a step: it contributes its own gradients, or zeros to those of the ranks with data left.
    enum class Role { own, shadow };

    void take_slices();
    // --- memory.cc
    // Where each gradient is in their memory, and the size of all.
    struct Layout {
        std::vector<size_t> places;
        size_t size = 0;
        size_t converted_size = 0;  // of the largest bucket in reduce_dtype
        size_t compared = 0;        // where the bits of compare() are
    };
    [[nodiscard]] Layout layout_of_gradients() const;
    void lay_out_gradients(const Layout& layout, std::shared_ptr<DeviceGrads> device);
    void group(std::span<const size_t> order);
    void write_compared();
    [[nodiscard]] bool read_agreement() const;
    void broadcast_values(int from);
    void broadcast_on_device(int from);
    void share_params();
    // --- buffers.cc
    void take_buffers(const std::function<std::vector<NamedTensor>()>& make);
    void move_buffers(int from);
    void broadcast_buffers_on_device(int from);
    // --- on_device.cc
    void launch_on_device(size_t bucket, Role role);
    void begin_step_on_device();
    void end_step_on_device(Role role);
    void take_device_stats();
    void zero_memory();
    void check_device();
    void on_device(FunctionRef<void(DeviceGrads&)> body);
    [[nodiscard]] Error cause_of(const Error& error) const;
    // --- uneven.cc
    void shadow_step();
    void take_part_until_all_joined(bool sync_params);

    // --- ddp.cc
    void begin_step();
    void launch_full_buckets();
    void launch(size_t bucket, Role role);
    [[nodiscard]] bool learns_order() const { return synced_steps_ == 0 && options_.rebuild_buckets; }
    void launch_order();
    void set_aside(size_t param);
    // Runs a part of a step that may issue work. INVALID_STATE is thrown before anything has happened, or not at all.
    template <class Body>
    void issue(Body&& body) {
        if (!sync_) return body();
        comm_->in_one_call(body);
    }
    [[nodiscard]] WorkPtr submit(std::function<void()> job);
    void close_step();
    void finish_step(Role role);
    void await_works();
    void reset_step();
    void take_stats();
    void launch_used();
    // In a static graph, only parameters of the first step.
    [[nodiscard]] bool may_be_ready(size_t param) const;
    void count_ready(size_t param);
    [[nodiscard]] bool shares_used() const {
        return options_.find_unused || (options_.static_graph && synced_steps_ == 0);
    }
    [[nodiscard]] std::string names_of(const std::vector<size_t>& indices) const;
    [[nodiscard]] Error refusal(Code code, const std::string& why) const;
    [[nodiscard]] Error failure() const;

    std::shared_ptr<Communicator> comm_;
    std::vector<NamedTensor> params_;
    DdpOptions options_;
    const std::shared_ptr<TensorParallel> slices_;
    std::vector<size_t> slice_of_;  // of each parameter: its index in slices_
    std::vector<Bucket> buckets_;
    std::vector<size_t> bucket_of_;     // of each parameter
    std::shared_ptr<Reducer> reducer_;  // shared with the jobs in the queue
    std::vector<Tensor> grads_;

    const std::shared_ptr<BackwardStep> stepping_ = std::make_shared<BackwardStep>();  // shared with jobs in the queue
    std::shared_ptr<SharedStep> shared_;                                               // with the option share_params
    std::shared_ptr<std::byte> params_memory_;                                         // memory of the host's copy

    uint64_t compared_ = 0;
    bool ranks_agreed_ = true;
    // With the option `compares`: two elements for each bit of the number, the bit and its opposite, behind the gradients
    // of one bucket.
    Tensor compared_bits_;
    size_t compared_with_ = 0;  // the bucket

    std::vector<NamedTensor> buffers_;
    std::shared_ptr<Buffer> buffers_memory_;

    bool sync_ = true;
    int64_t synced_steps_ = 0;
    int64_t own_steps_ = 0;  // own steps since the last join
    int64_t averaged_steps_ = 0;
    StepCounter counter_{StepCounter::Of::model};
    std::vector<char> globally_used_;
    std::vector<char> expected_;  // static graph: parameters marked ready in this rank's first step; empty before it
    std::vector<BucketStats> stats_;
    bool timed_ = true;  // stats_ have the times of the last step, which on a device are taken when somebody asks

    struct Step {
        bool begun = false;
        bool all_said = false;                        // marked by ready_all
        bool closed = false;                          // no more gradients become ready, all buckets are launched
        std::vector<char> ready;                      // of each parameter
        std::vector<size_t> arrivals;                 // until the buckets are rebuilt
        std::shared_ptr<std::vector<int64_t>> order;  // order of arrival; rank 0's once the broadcast is done
        std::vector<size_t> missing;                  // of each bucket: parameters not ready yet
        size_t launched = 0;                          // buckets
        std::vector<WorkPtr> works;                   // of what was launched, in order
        std::vector<std::pair<size_t, std::vector<std::byte>>> set_aside;  // values of gradients that this rank lacks
        Clock::time_point begin;
        Clock::time_point wait_begin;
    };
    Step step_;
    std::vector<char> has_grad_;  // since the last synchronised step
    std::optional<Error> failed_;
};

}  // namespace tsr
