// Adagrad (Duchi et al. 2011) as in torch.optim.Adagrad: each element's rate is divided by the root of the sum of its squared
// gradients; weight decay is added to the gradient.
#pragma once

#include "optim/optimizer.hpp"

namespace tsr {

struct AdagradOptions {
    double lr = 1e-2;
    double lr_decay = 0;
    double weight_decay = 0;
    double initial_accumulator_value = 0;
    double eps = 1e-10;
};

class Adagrad final : public Optimizer {
   public:
    Adagrad(std::vector<OptimizerParam> params, const AdagradOptions& options, std::shared_ptr<SharedCopy> copy = {});
    [[nodiscard]] std::string_view kind() const override { return "adagrad"; }
    void check_momentum() const override;

   private:
    void update(int64_t step, std::span<const ParamSlice> slices) override;
    [[nodiscard]] Settings own_settings() const override;
    void load_own_settings(const Settings& settings) override;
    void set_own_momentum(double /*momentum*/) override {}

    AdagradOptions options_;  // except lr, which the base class owns
};

}  // namespace tsr
