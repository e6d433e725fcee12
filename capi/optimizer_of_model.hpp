// The deleter of an optimizer that was made of a model. It tells which model that is.
#pragma once

#include <memory>

#include "optim/optimizer.hpp"
#include "parallel/ddp/ddp.hpp"

namespace tsr::capi {

// Before the optimizer ends, a bucket that is just being updated is finished, and no other is begun.
struct OptimizerOfModel {
    std::shared_ptr<Optimizer> made;
    std::shared_ptr<Ddp> model;

    void operator()(Optimizer* ending) {
        model->forget_optimizer(*ending);
        made.reset();
    }
};

}  // namespace tsr::capi
