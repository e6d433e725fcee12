// Dynamic scaling of losses, so that small gradients of f16 are not lost, after PyTorch's torch.amp.GradScaler (Micikevicius
// and others, "Mixed Precision Training", ICLR 2018): the trainer multiplies its loss by scale(); a step whose gradients
// have an infinity or NaN is left out and the scale becomes smaller, and after some steps without one it grows. Where ranks hold
// parts of the gradients all of them leave the step out, or none. Owned by one thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "optim/optimizer.hpp"

namespace tsr {

struct GradScalerOptions {
    double init_scale = 65536;
    double growth_factor = 2;
    double backoff_factor = 0.5;
    int64_t growth_interval = 2000;  // steps in a row without an infinity or NaN
};

class GradScaler {
   public:
    explicit GradScaler(const GradScalerOptions& options);

    [[nodiscard]] double scale() const { return scale_; }

    // Divides the gradients by the scale; once between two update()s. Collective where ranks hold parts of them.
    void unscale(const std::shared_ptr<Optimizer>& optimizer);
    // Makes the optimizer's step if its gradients, which are unscaled before if they were not yet, are all finite. Returns
    // whether it did.
    bool step(const std::shared_ptr<Optimizer>& optimizer);
    // Ends an iteration: the scale of the next one, by what was found in the gradients of all optimizers.
    void update();

    // What is saved, with the names of PyTorch's state_dict: the scale, the steps in a row that were made, and the options.
    [[nodiscard]] Settings settings() const;
    // Takes them back, all of them; an iteration that has begun is forgotten. Throws INVALID_ARGUMENT and changes nothing.
    void load_settings(const Settings& settings);

   private:
    struct Stage {
        bool finite = true;
        bool stepped = false;
    };
    [[nodiscard]] Stage unscaled(const std::shared_ptr<Optimizer>& optimizer);

    GradScalerOptions options_;
    double scale_;  // init_scale is of no use later
    int64_t tracker_ = 0;
    // Since the last update. An optimizer that has ended is nobody's any more, whoever has its address now.
    std::map<std::weak_ptr<Optimizer>, Stage, std::owner_less<>> stages_;
};

}  // namespace tsr
