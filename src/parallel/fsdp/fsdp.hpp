// Fully sharded data-parallel training: every rank holds a shard of each parameter, of its gradient and of what the
// optimizer keeps. The trainer groups parameters into units and says where a unit's forward and backward begin and end; a
// unit's parameters are whole in between, in one copy a host (whole_copies.hpp), and its gradients are reduced into the
// shards while backward goes on (gradient_scatter.hpp).
//
//     forward(u)        whole, and the units that come next on their way
//     forward_done(u)   sharded again, or kept until its backward: whole, or among fewer ranks
//     backward(u)       whole again; memory for its gradients
//     grads_ready(u)    gradients on their way into the shards, parameters sharded again
//     wait()            the end of backward: all of that is done
//
// A unit that is used more than once in a step has as many forwards; backward and grads_ready come once or as often, and what
// they give is added up.
//
// A unit may be sharded after its backward and its memory left to it (set_reshard_after_backward): when it is to be whole
// the next time, what lies there is used, unless a shard was changed.
//
// All ranks make the same calls of forward, backward and grads_ready in the same order. Memory is given out by these calls
// alone, never by what happens to be done, so that the ranks agree on it without a word.
//
// Owned by one thread; two communicators of its own, for parameters and for gradients, work beside each other.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/reentry.hpp"
#include "comm/communicator.hpp"
#include "optim/optimizer.hpp"
#include "parallel/fsdp/address_range.hpp"
#include "parallel/fsdp/gradient_scatter.hpp"
#include "parallel/fsdp/options.hpp"
#include "parallel/fsdp/slots.hpp"
#include "parallel/fsdp/unit_plan.hpp"
#include "parallel/fsdp/whole_copies.hpp"
#include "parallel/params.hpp"

namespace tsr {

// Where a unit is in its step. The last one until wait().
enum class UnitPhase { sharded = 0, on_its_way = 1, whole = 2, backward = 3, reducing = 4 };

class Fsdp {
   public:
    // Collective: checks that all ranks register the same. The tensors' memory is read in here and not used later.
    Fsdp(const std::shared_ptr<Communicator>& comm, std::vector<FsdpUnit> units, const FsdpOptions& options);
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

    // Gives up the step that has begun, however far it is: every unit is sharded and every gradient zero.
    void abandon();

    // Asked for by the program itself: a unit is on its way, whole, sharded again.
    void unshard(size_t unit);
    void await_unit(size_t unit);
    void reshard(size_t unit);
    [[nodiscard]] UnitPhase phase(size_t unit) const;

    // Whole, of a unit that is: at the same address whenever it is. INVALID_STATE otherwise.
    [[nodiscard]] Tensor whole(size_t param) const;
    // Whole, between backward() and grads_ready() of its unit; not cleared, unless it adds up over steps without
    // synchronisation.
    [[nodiscard]] Tensor grad(size_t param) const;
    // This rank has no gradient of it in this backward.
    void unused(size_t param);
    // Whether any rank had one in the last step that was reduced.
    [[nodiscard]] bool used(size_t param) const;
    // The same; where gradients add up, in any step since they were set to zero.
    [[nodiscard]] bool has_grad(size_t param) const;
    // Gradients of the shards were set to zero by another hand.
    void forget_gradients();
    // This rank's part and its gradient; for good.
    [[nodiscard]] Tensor shard(size_t param) const;
    [[nodiscard]] Tensor shard_grad(size_t param) const;
    [[nodiscard]] Held held(size_t param) const;

    // Between steps. Without synchronisation gradients add up whole on each rank; accumulating, what is reduced adds to the
    // shards' gradients.
    void set_sync(bool sync);
    void set_accumulate(bool accumulate);
    // Whether a unit's memory is another's after its backward.
    void set_reshard_after_backward(size_t unit, bool reshard);
    // Over replicas, too. Without, what is reduced stays among the ranks of each, or all, until a backward with it.
    void set_all_reduce(bool all_reduce);
    void zero_grad();

    // Throws INVALID_STATE where shards must not be changed: a unit is not sharded, or something failed. `what` says what
    // cannot be done.
    void check_idle(const char* what) const;
    // Backwards whose gradients were reduced into the shards, over replicas too.
    [[nodiscard]] int64_t synced_steps() const { return synced_steps_; }
    // Throws INVALID_STATE where an optimizer must not step: as check_idle(), or there were no more than `steps` of those.
    void check_reduced_after(int64_t steps) const;

   private:
    enum class Pass { none, forward, backward };
    // A unit's parameters as this rank has them.
    enum class Memory {
        none,        // sharded
        left,        // sharded; what was whole is still in its slot
        on_its_way,  // into its slot
        whole,
    };
    // A unit's gradients in this step. After a first backward they are added to.
    enum class Backward { none, begun, done, begun_again };
    struct UnitState {
        AddressRange range;
        std::vector<size_t> trained;
        int keeping_hosts = 0;           // that keep it from forward to backward: 1, all of it, 0: none does
        std::shared_ptr<KeptPart> kept;  // by this one, if there are more
        bool is_kept = false;
        Memory memory = Memory::none;
        size_t slot = 0;                  // unless `memory` is none
        std::optional<size_t> last_slot;  // whose memory the range shows, or did
        WorkPtr gathering;                // while it is on its way
        bool reshards = true;             // after its backward
        Backward backward = Backward::none;
        std::optional<size_t> grad_slot;  // in use
        bool clears_grads = false;        // before they are written
        bool sums = false;                // of steps without synchronisation are in them

        [[nodiscard]] bool is_gathered() const { return memory == Memory::on_its_way || memory == Memory::whole; }
        [[nodiscard]] bool in_backward() const {
            return backward == Backward::begun || backward == Backward::begun_again;
        }
        // Gradients of this step are in the shards, or on their way.
        [[nodiscard]] bool is_reduced() const {
            return backward == Backward::done || backward == Backward::begun_again;
        }
    };

    void take_memory();
    void take_values(const std::vector<FsdpUnit>& units);
    [[nodiscard]] size_t scattered(size_t unit, Range pieces) const;
    void scatter_values(const FsdpUnit& unit, size_t number, Range pieces, const std::vector<size_t>& params);
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
    void await(const WorkPtr& work);
    void fail_if_failed() const;
    [[nodiscard]] Error refusal(Code code, const std::string& why) const;
    [[nodiscard]] WorkPtr submit(Communicator& comm, std::function<void()> job);

    const std::shared_ptr<Communicator> comm_;
    FsdpOptions options_;
    std::shared_ptr<FsdpPlan> plan_;
    std::shared_ptr<WholeCopies> copies_;
    std::shared_ptr<GradientScatter> scatter_;
    std::shared_ptr<std::byte> shards_;
    std::shared_ptr<std::byte> shard_grads_;
    std::vector<UnitState> states_;

    WholeSlots whole_slots_;
    GradSlots grad_slots_;

    Pass pass_ = Pass::none;
    std::vector<size_t> order_;     // of the forward pass before this one
    std::vector<size_t> recorded_;  // of this one
    // One byte a parameter.
    std::vector<uint8_t> unused_;   // this rank has no gradient in this backward of its unit
    std::vector<uint8_t> written_;  // it had one since the last step that was reduced
    std::vector<uint8_t> used_;
    std::vector<uint8_t> has_grad_;
    std::shared_ptr<std::vector<uint8_t>> shared_used_;  // while the ranks tell each other
    WorkPtr sharing_;

    bool sync_ = true;
    bool accumulate_ = false;
    bool all_reduce_ = true;
    int64_t synced_steps_ = 0;
    std::optional<Error> failed_;
};

}  // namespace tsr
