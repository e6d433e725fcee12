// Lamb (You et al. 2020, "Large batch optimization for deep learning") as DeepSpeed's FusedLamb: the direction of Adam plus
// weight decay, scaled for each parameter by its trust ratio, the norm of the parameter over that of the direction. Norms are
// exact until they are rounded once, so they have the same bits however ranks divide a parameter. On the CPU only.
#pragma once

#include "optim/optimizer.hpp"

namespace tsr {

struct LambOptions {
    double lr = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double eps = 1e-8;
    double weight_decay = 0;
    bool bias_correction = true;  // multiplies lr by sqrt(1 - beta2^step) / (1 - beta1^step)
    double max_coeff = 10;        // bounds of the trust ratio, which is 1 if one of the norms is 0
    double min_coeff = 0.01;
};

class Lamb final : public Optimizer {
   public:
    // Throws UNSUPPORTED for parameters on a device, and if `copy` is given: a rank then updates a part of each parameter.
    Lamb(std::vector<OptimizerParam> params, const LambOptions& options, const std::shared_ptr<SharedCopy>& copy = {});
    [[nodiscard]] std::string_view kind() const override { return "lamb"; }
    [[nodiscard]] bool needs_norms() const override { return true; }

   private:
    // Of full parameters, or of all that this rank holds of them.
    void update(int64_t step, std::span<const ParamSlice> slices) override;
    [[nodiscard]] Settings own_settings() const override;
    void load_own_settings(const Settings& settings) override;
    void set_own_momentum(double momentum) override { options_.beta1 = momentum; }

    LambOptions options_;  // except lr, which the base class owns
};

}  // namespace tsr
