// Stochastic gradient descent as in torch.optim.SGD: weight decay added to the gradient, momentum (the first step's
// buffer is the undampened gradient), and Nesterov momentum.
#pragma once

#include "optim/optimizer.hpp"

namespace tsr {

struct SgdOptions {
    double lr = 1e-3;
    double momentum = 0;
    double dampening = 0;
    double weight_decay = 0;
    bool nesterov = false;
};

class Sgd final : public Optimizer {
   public:
    Sgd(std::vector<OptimizerParam> params, const SgdOptions& options, std::shared_ptr<SharedCopy> copy = {});
    [[nodiscard]] std::string_view kind() const override { return "sgd"; }
    void check_momentum() const override;

   private:
    void update(int64_t step, std::span<const ParamSlice> slices) override;
    [[nodiscard]] Settings own_settings() const override;
    void load_own_settings(const Settings& settings) override;
    void set_own_momentum(double momentum) override { options_.momentum = momentum; }

    SgdOptions options_;  // except lr, which the base class owns
};

}  // namespace tsr
