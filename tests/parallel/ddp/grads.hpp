// What the tests of DDP's options share: buckets of one parameter each, and gradients of one value.
#pragma once

#include <cstddef>

#include "parallel/ddp/ddp.hpp"

namespace tsr::testing {

// One parameter a bucket.
inline DdpOptions small(DdpOptions options = {}) {
    options.bucket_bytes = options.first_bucket_bytes = 64;
    return options;
}

inline void fill(const Ddp& ddp, size_t param, float value) {
    for (float& g : ddp.grad(param).as<float>()) g = value;
}

}  // namespace tsr::testing
