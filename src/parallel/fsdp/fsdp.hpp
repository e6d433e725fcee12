// Fully sharded data-parallel training: every rank holds a shard of each parameter, of its gradient and of the
// optimizer's state. The trainer groups parameters into units and marks where a unit's forward and backward begin and
// end. In between a unit's parameters are unsharded ("whole"), and its gradients are reduced into the shards during
// backward. This is the schedule; how it is done on the CPU and on a device is in host_units.hpp and device_units.hpp.
//
//     forward(u)        unshards it, and prefetches the next units
//     forward_done(u)   shards it again, or keeps it until its backward: whole, or over fewer ranks
//     backward(u)       unshards it again; takes memory for its gradients
//     grads_ready(u)    reduces its gradients into the shards, shards its parameters
//     wait()            end of backward: all of this is done
//
// A unit that is used several times in a step has as many forwards; backward and grads_ready come once or as often, and
// their gradients are summed.
//
// A unit may be sharded after its backward and still keep its memory (set_reshard_after_backward): the next time it is
// unsharded, the content is reused unless a shard has changed.
//
// All ranks make the same calls of forward, backward and grads_ready in the same order. Memory is assigned by these
// calls alone, never by timing, so the ranks agree on it without communication.
//
// Owned by one thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/meter.hpp"
#include "base/reentry.hpp"
#include "comm/communicator.hpp"
#include "optim/optimizer.hpp"
#include "parallel/fsdp/options.hpp"
#include "parallel/fsdp/slots.hpp"
#include "parallel/fsdp/unit_place.hpp"
#include "parallel/fsdp/unit_plan.hpp"
#include "parallel/params.hpp"

namespace tsr {

// The phase of a unit in its step. `reducing` lasts until wait().
enum class UnitPhase { sharded = 0, on_its_way = 1, whole = 2, backward = 3, reducing = 4 };

class TensorParallel;

class Fsdp {
   public:
    // Collective: checks that all ranks register the same model. The tensors' memory is read only in the constructor; on
    // a device, in the order of its default stream.
    // `slices`: the tensor-parallel model whose slices the parameters are, if any.
    Fsdp(const std::shared_ptr<Communicator>& comm, std::vector<FsdpUnit> units, const FsdpOptions& options,
         std::shared_ptr<TensorParallel> slices = nullptr);
    ~Fsdp();
    Fsdp(const Fsdp&) = delete;
    Fsdp& operator=(const Fsdp&) = delete;

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return comm_; }
    [[nodiscard]] size_t units() const { return plan_->units.size(); }
    [[nodiscard]] const UnitPlan& unit(size_t index) const;
    [[nodiscard]] size_t params() const { return plan_->params.size(); }
    [[nodiscard]] const FsdpParam& param(size_t index) const;

    void forward(size_t unit);
    void forward_done(size_t unit);
    void backward(size_t unit);
    void grads_ready(size_t unit);
    void wait();

    // Abandons the current step at any point: every unit is sharded and every gradient is zero.
    void abandon();

    // Explicit control by the program: begin to unshard a unit, wait for it, shard it again.
    void unshard(size_t unit);
    void await_unit(size_t unit);
    void reshard(size_t unit);
    [[nodiscard]] UnitPhase phase(size_t unit) const;

    // The unsharded parameter, at the same address whenever its unit is unsharded. INVALID_STATE otherwise.
    [[nodiscard]] Tensor whole(size_t param) const;
    // The unsharded gradient, between backward() and grads_ready() of its unit; not cleared, unless it accumulates over
    // steps without synchronisation.
    [[nodiscard]] Tensor grad(size_t param) const;
    // Marks the parameter as having no gradient on this rank in this backward.
    void unused(size_t param);
    // A number that all ranks should have alike in the next reduced step. It travels with what they tell each other anyway.
    void compare(uint64_t number) { compared_ = number; }
    // Whether they had in the last one: the same answer on every rank.
    [[nodiscard]] bool ranks_agreed() const { return ranks_agreed_; }
    // Whether any rank had a gradient in the last reduced step.
    [[nodiscard]] bool used(size_t param) const;
    // The same; if gradients accumulate, in any step since they were set to zero.
    [[nodiscard]] bool has_grad(size_t param) const;
    // The gradients of the shards were set to zero from outside.
    void forget_gradients();
    // This rank's part and its gradient; valid for the life of the object.
    [[nodiscard]] Tensor shard(size_t param) const;
    [[nodiscard]] Tensor shard_grad(size_t param) const;
    [[nodiscard]] Held held(size_t param) const;
    // The tensor-parallel model whose slices the parameters are; nullptr: whole parameters.
    [[nodiscard]] const std::shared_ptr<TensorParallel>& slices() const { return slices_; }

    // On a device: the trainer's stream, on which it uses what it gets from this object. What a call waits for, this
    // stream waits for. Between steps; as created, the default stream.
    void set_stream(StreamHandle stream);
    // Between steps. Without synchronisation, gradients accumulate unsharded on each rank. With accumulation, reduced
    // gradients are added to the shards' gradients.
    void set_sync(bool sync);
    void set_accumulate(bool accumulate);
    // Whether a unit's memory is free for other units after its backward.
    void set_reshard_after_backward(size_t unit, bool reshard);
    // Whether to reduce over replicas, too. If not, sums stay within each replica until a backward that does.
    void set_all_reduce(bool all_reduce);
    void zero_grad();

    // Throws INVALID_STATE if shards must not be changed: a unit is not sharded, or something failed. `what` begins the
    // message.
    void check_idle(const char* what) const;
    // The number of backward passes reduced into the shards, including over replicas.
    [[nodiscard]] int64_t synced_steps() const { return synced_steps_; }
    // Throws INVALID_STATE if an optimizer must not step: as check_idle(), or if synced_steps() is not above `steps`.
    void check_reduced_after(int64_t steps) const;

   private:
    enum class Pass { none, forward, backward };
    // State of a unit's parameters on this rank.
    enum class Memory {
        none,        // sharded
        left,        // sharded; the unsharded copy is still in its slot
        on_its_way,  // being unsharded into its slot
        whole,
    };
    // State of a unit's gradients in this step. A later backward adds to them.
    enum class Backward { none, begun, done, begun_again };
    struct UnitState {
        std::vector<size_t> trained;
        int keepers = 0;  // parts in which it is kept from forward to backward; 1: all of it; 0: nothing
        bool is_kept = false;
        Memory memory = Memory::none;
        size_t slot = 0;                  // unless `memory` is none
        std::optional<size_t> last_slot;  // in which it was unsharded last
        WorkPtr gathering;                // while it is on its way
        bool reshards = true;             // after its backward
        Backward backward = Backward::none;
        std::optional<size_t> grad_slot;  // in use
        bool clears_grads = false;        // before they are written
        bool sums = false;                // they contain sums of steps without synchronisation

        [[nodiscard]] bool is_gathered() const { return memory == Memory::on_its_way || memory == Memory::whole; }
        [[nodiscard]] bool in_backward() const {
            return backward == Backward::begun || backward == Backward::begun_again;
        }
        // Whether gradients of this step are in the shards or being reduced.
        [[nodiscard]] bool is_reduced() const {
            return backward == Backward::done || backward == Backward::begun_again;
        }
    };

    void take_memory();
    void take_values(const std::vector<FsdpUnit>& units);
    [[nodiscard]] size_t scattered(size_t unit, Range pieces) const;
    void scatter_values(const FsdpUnit& unit, size_t number, Range pieces, const std::vector<size_t>& params);
    [[nodiscard]] Held held_of_slice(size_t param) const;
    [[nodiscard]] int shard_ranks() const { return plan_->ranks; }
    [[nodiscard]] UnitState& state(size_t unit);
    void begin_whole(size_t unit);
    void await_whole(size_t unit);
    void give_back(size_t unit);
    void end_backward(size_t unit);
    void prefetch(Pass pass, size_t current);
    void take_grad_slot(size_t unit);
    void refuse_unwritten(size_t unit) const;
    void share_used();
    void give_up_gradients();
    void check_not_in_backward(const char* what) const;
    [[nodiscard]] Reentry enter() const { return {this, "the model of communicator", comm_->name()}; }
    // Of a call that takes the ranks that shard the units together, or also those that reduce gradients with them.
    enum class Among { shards, reduction };
    [[nodiscard]] Reentry enter(Among among) const;
    void await(const WorkPtr& work);
    void fail_if_failed() const;
    [[nodiscard]] Error refusal(Code code, const std::string& why) const;
    // Runs what begins something in the background. An error other than INVALID_STATE and INTERRUPTED is the model's end.
    template <class Body>
    auto attempt(Body&& body);
    [[nodiscard]] Tensor tensor_at(std::byte* data, const Dims& shape, DType dtype) const {
        return {data, shape, dtype, device_};
    }

    const std::shared_ptr<Communicator> comm_;
    FsdpOptions options_;
    const std::shared_ptr<TensorParallel> slices_;
    Device device_;                          // of the parameters
    std::vector<size_t> slice_of_;           // of each parameter: its index in slices_
    mutable std::vector<FsdpPlan> plan_at_;  // by place in the tensor-parallel group; made when it is needed
    std::shared_ptr<FsdpPlan> plan_;
    ShardMemory shards_;
    std::unique_ptr<UnitPlace> place_;
    std::vector<UnitState> states_;

    WholeSlots whole_slots_;
    GradSlots grad_slots_;

    Pass pass_ = Pass::none;
    std::vector<size_t> order_;     // of the previous forward pass
    std::vector<size_t> recorded_;  // of this one
    // One byte a parameter.
    std::vector<uint8_t> unused_;   // this rank has no gradient in this backward of its unit
    std::vector<uint8_t> written_;  // it had one since the last reduced step
    std::vector<uint8_t> used_;
    std::vector<uint8_t> has_grad_;
    // While it is being reduced: written_, then the bytes of compared_ and of its complement.
    std::shared_ptr<std::vector<uint8_t>> shared_used_;
    uint64_t compared_ = 0;
    bool ranks_agreed_ = true;
    WorkPtr sharing_;

    bool sync_ = true;
    bool accumulate_ = false;
    bool all_reduce_ = true;
    int64_t synced_steps_ = 0;
    StepCounter counter_{StepCounter::Of::model};
    std::optional<Error> failed_;
};

}  // namespace tsr
