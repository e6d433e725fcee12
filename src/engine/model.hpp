// The data-parallel model that an engine trains, behind one interface: DDP, or FSDP in one of its forms. The trainer's
// calls are the same for both, and this class refuses those out of order; what a replicated model does not need does nothing
// there.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "engine/config.hpp"
#include "optim/optimizer.hpp"
#include "parallel/params.hpp"
#include "tensor/tensor.hpp"
#include "train/optimizer_of.hpp"

namespace tsr {

// A part of the model whose parameters are used together, such as a layer.
struct EngineUnit {
    std::string name;
    std::vector<NamedTensor> params;
};

class EngineModel {
   public:
    // Collective: checks that all ranks register the same model and begins with rank 0's values.
    [[nodiscard]] static std::unique_ptr<EngineModel> make(const std::shared_ptr<Communicator>& comm,
                                                           std::vector<EngineUnit> units, const EngineConfig& config);
    virtual ~EngineModel() = default;

    // Parameters are numbered through the units. Their values, and the gradients to write: in the backward of their unit.
    [[nodiscard]] virtual Tensor param(size_t index) const = 0;
    [[nodiscard]] Tensor grad(size_t index) const;

    void forward(size_t unit);
    // `keeps`: a backward of the unit follows.
    void forward_done(size_t unit, bool keeps);

    // Begins a backward pass: whether it reduces the gradients, and whether there are gradients of earlier ones to add to.
    virtual void begin_pass(bool reduces, bool adds) = 0;
    // A unit has one backward in a pass: until all its gradients are ready. An interrupted call is made again.
    void backward(size_t unit);
    void ready(size_t param);
    // Marks what is not ready yet in a unit.
    void unit_ready(size_t unit);
    // Throws INVALID_STATE, which names what is not ready.
    void check_all_ready() const;
    // Ends the pass and waits for its reductions. Gradients that are not ready count as zeros.
    void end_pass();
    virtual void zero_grad() = 0;
    // Before a pass that reduces: a number that all ranks should have alike; after it: whether they had.
    virtual void compare(uint64_t number) = 0;
    [[nodiscard]] virtual bool ranks_agreed() const = 0;

    [[nodiscard]] virtual std::shared_ptr<Optimizer> make_optimizer(MakeOptimizer make) = 0;
    // What states are made of; null: it is of the other kind.
    [[nodiscard]] virtual std::shared_ptr<Ddp> ddp() const { return nullptr; }
    [[nodiscard]] virtual std::shared_ptr<Fsdp> fsdp() const { return nullptr; }

    [[nodiscard]] size_t params() const { return unit_of_.size(); }
    [[nodiscard]] size_t units() const { return first_.size() - 1; }
    [[nodiscard]] size_t unit_of(size_t param) const;
    void check_unit(size_t unit) const;
    [[nodiscard]] const std::string& name_of_unit(size_t unit) const;
    [[nodiscard]] const std::string& name_of_param(size_t param) const;
    [[nodiscard]] const Dims& shape_of_param(size_t param) const;
    // The parameter of this name; INVALID_ARGUMENT if there is none.
    [[nodiscard]] size_t find(const std::string& name) const;

   protected:
    EngineModel(int rank, const std::vector<EngineUnit>& units);
    // The parameters of a unit: [first(u), first(u + 1)).
    [[nodiscard]] size_t first(size_t unit) const { return first_[unit]; }
    [[nodiscard]] bool is_ready(size_t param) const { return ready_[param] != 0; }

   private:
    // The calls above, in order.
    [[nodiscard]] virtual Tensor grad_to_write(size_t param) const = 0;
    virtual void take_unit(size_t unit) = 0;
    virtual void leave_unit(size_t unit, bool keeps) = 0;
    virtual void begin_backward(size_t unit) = 0;
    // `is_last`: the others of its unit are ready.
    virtual void mark_ready(size_t param, bool is_last) = 0;
    virtual void clear_missing(size_t unit) = 0;
    virtual void finish() = 0;

    [[nodiscard]] bool in_backward(size_t unit) const { return begun_[unit] != 0 && missing_[unit] > 0; }
    void forget_pass();
    [[nodiscard]] Error refusal(const std::string& why) const;

    const int rank_;
    std::vector<std::string> unit_names_;
    std::vector<size_t> first_;  // one more than units
    std::vector<size_t> unit_of_;
    std::vector<std::string> names_;
    std::vector<Dims> shapes_;

    std::vector<char> begun_;      // per unit: its backward has begun in this pass
    std::vector<size_t> missing_;  // per unit: gradients that are not ready
    std::vector<char> ready_;      // per parameter
};

}  // namespace tsr
