// Dynamic loss scaling, which keeps small f16 gradients from underflowing, after PyTorch's torch.amp.GradScaler
// (Micikevicius and others, "Mixed Precision Training", ICLR 2018). The trainer multiplies its loss by scale(). A step
// whose gradients contain an infinity or NaN is skipped and the scale shrinks; after some steps without one it grows.
// If ranks hold parts of the gradients, all of them skip the step or none. Owned by one thread.
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
    int64_t growth_interval = 2000;  // consecutive steps without an infinity or NaN
};

class GradScaler {
   public:
    explicit GradScaler(const GradScalerOptions& options);

    [[nodiscard]] double scale() const { return scale_; }

    // Divides the gradients by the scale; once between two update()s. Collective if ranks hold parts of them.
    void unscale(const std::shared_ptr<Optimizer>& optimizer);
    // Makes the optimizer's step if its gradients are all finite. Unscales them first if that is not done yet. Returns
    // whether the step was made.
    bool step(const std::shared_ptr<Optimizer>& optimizer);
    // Ends an iteration: sets the next scale from what was found in the gradients of all optimizers.
    void update();

    // The saved settings, with the names of PyTorch's state_dict: the scale, the count of consecutive steps, and the
    // options.
    [[nodiscard]] Settings settings() const;
    // Restores all settings; an iteration that has begun is discarded. On INVALID_ARGUMENT nothing changes.
    void load_settings(const Settings& settings);

   private:
    struct Stage {
        bool finite = true;
        bool stepped = false;
    };
    [[nodiscard]] Stage unscaled(const std::shared_ptr<Optimizer>& optimizer);

    GradScalerOptions options_;
    double scale_;  // init_scale is not used later
    int64_t tracker_ = 0;
    // Since the last update. Keyed by ownership, so a new optimizer at a destroyed one's address is not confused with
    // it.
    std::map<std::weak_ptr<Optimizer>, Stage, std::owner_less<>> stages_;
};

}  // namespace tsr
