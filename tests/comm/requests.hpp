// What the tests of failures share: a tensor over numbers, and a sum of it over all ranks.
#pragma once

#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "tensor/tensor.hpp"

namespace tsr::testing {

inline Tensor over(std::vector<float>& values) { return tensor_of(std::span<float>(values), DType::f32); }

inline Request all_reduce(const Tensor& tensor) {
    return {Collective::all_reduce, {}, {&tensor, 1}, ReduceOp::sum, -1, 0, {}};
}

}  // namespace tsr::testing
