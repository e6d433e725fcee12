// Adam and AdamW as in torch.optim: bias-corrected moments, with weight decay added to the gradient (Adam) or applied
// to the parameter (AdamW).
#pragma once

#include "optim/optimizer.hpp"

namespace tsr {

enum class Decay { in_gradient, decoupled };

struct AdamOptions {
    double lr = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double eps = 1e-8;
    double weight_decay = 0;
    Decay decay = Decay::in_gradient;
};

class Adam final : public Optimizer {
   public:
    Adam(std::vector<OptimizerParam> params, const AdamOptions& options, std::shared_ptr<SharedCopy> copy = {});
    [[nodiscard]] std::string_view kind() const override;

   private:
    void update(int64_t step, std::span<const ParamSlice> slices) override;
    [[nodiscard]] Settings own_settings() const override;
    void load_own_settings(const Settings& settings) override;
    void set_own_momentum(double momentum) override { options_.beta1 = momentum; }

    AdamOptions options_;  // except lr, which the base class owns
};

}  // namespace tsr
