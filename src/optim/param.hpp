// A parameter that an optimizer updates.
#pragma once

#include <optional>
#include <string>

#include "tensor/layout.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// Describes a tensor that is a part of a larger one, with its boxes one after another: the layout, and the rank that
// holds this part.
struct Held {
    Layout layout;
    int rank = 0;
    int replica = 0;  // index among the ranks that hold the same part
};

struct OptimizerParam {
    std::string name;
    Tensor value;
    Tensor grad;
    std::optional<Held> held{};  // none: the full parameter
    bool counted = true;         // in the norm of the gradients
};

}  // namespace tsr
