// Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms"): each element moves by the rate, against the sign
// of a mean of gradients, with decoupled weight decay. An element whose mean is 0 stays. DeepSpeed's kernels move it (FusedLion
// up, CPULion by the sign of the zero); otherwise they do the same.
#pragma once

#include "optim/optimizer.hpp"

namespace tsr {

struct LionOptions {
    double lr = 1e-4;
    double beta1 = 0.9;
    double beta2 = 0.99;
    double weight_decay = 0;
};

class Lion final : public Optimizer {
   public:
    Lion(std::vector<OptimizerParam> params, const LionOptions& options, std::shared_ptr<SharedCopy> copy = {});
    [[nodiscard]] std::string_view kind() const override { return "lion"; }

   private:
    void update(int64_t step, std::span<const ParamSlice> slices) override;
    [[nodiscard]] Settings own_settings() const override;
    void load_own_settings(const Settings& settings) override;
    void set_own_momentum(double momentum) override { options_.beta1 = momentum; }

    LionOptions options_;  // except lr, which the base class owns
};

}  // namespace tsr
