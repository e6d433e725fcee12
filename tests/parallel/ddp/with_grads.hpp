// A model's parameters and gradients as optimizers take them.
#pragma once

#include <vector>

#include "optim/optimizer.hpp"
#include "parallel/ddp/ddp.hpp"

namespace tsr::testing {

inline std::vector<OptimizerParam> with_grads(const Ddp& ddp) {
    std::vector<OptimizerParam> out;
    for (size_t i = 0; i < ddp.params().size(); ++i)
        out.push_back({ddp.param(i).name, ddp.param(i).tensor, ddp.grad(i)});
    return out;
}

}  // namespace tsr::testing
