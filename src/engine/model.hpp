// The data-parallel model that an engine trains, behind one interface: DDP, or FSDP in one of its forms. The trainer's
// calls are the same for both; what a replicated model does not need does nothing there.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

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

    // Parameters are numbered through the units. Their values, and the gradients to write.
    [[nodiscard]] virtual Tensor param(size_t index) const = 0;
    [[nodiscard]] virtual Tensor grad(size_t index) const = 0;

    virtual void forward(size_t unit) = 0;
    // `keeps`: a backward of the unit follows.
    virtual void forward_done(size_t unit, bool keeps) = 0;

    // Before a backward pass: whether it reduces the gradients, and whether there are gradients of earlier ones to add to.
    virtual void begin_pass(bool reduces, bool adds) = 0;
    virtual void backward(size_t unit) = 0;
    virtual void ready(size_t param) = 0;
    // Marks what is not ready yet in a unit.
    virtual void unit_ready(size_t unit) = 0;
    // Ends the pass and waits for its reductions. `fills_missing`: gradients that are not ready count as zeros.
    virtual void end_pass(bool fills_missing) = 0;
    virtual void zero_grad() = 0;

    [[nodiscard]] virtual std::shared_ptr<Optimizer> make_optimizer(MakeOptimizer make) = 0;
    // What states are made of; null: it is of the other kind.
    [[nodiscard]] virtual std::shared_ptr<Ddp> ddp() const { return nullptr; }
    [[nodiscard]] virtual std::shared_ptr<Fsdp> fsdp() const { return nullptr; }

    [[nodiscard]] size_t params() const { return unit_of_.size(); }
    [[nodiscard]] size_t units() const { return first_.size() - 1; }
    [[nodiscard]] size_t unit_of(size_t param) const;
    void check_unit(size_t unit) const;
    [[nodiscard]] const std::string& name_of_param(size_t param) const;
    [[nodiscard]] const Dims& shape_of_param(size_t param) const;
    // The parameter of this name; INVALID_ARGUMENT if there is none.
    [[nodiscard]] size_t find(const std::string& name) const;

   protected:
    explicit EngineModel(const std::vector<EngineUnit>& units);
    // The parameters of a unit: [first(u), first(u + 1)).
    [[nodiscard]] size_t first(size_t unit) const { return first_[unit]; }

   private:
    std::vector<size_t> first_;  // one more than units
    std::vector<size_t> unit_of_;
    std::vector<std::string> names_;
    std::vector<Dims> shapes_;
};

}  // namespace tsr
