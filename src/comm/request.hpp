// What a rank asks of its communicator: one collective or point-to-point operation, as plain values. A synchronous
// call builds it on the stack over the caller's tensors; an asynchronous one is copied into an OwnedRequest.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tensor/tensor.hpp"

namespace tsr {

enum class ReduceOp : int32_t { none = 0, sum = 1, avg = 2, min = 3, max = 4, prod = 5 };

enum class Collective : int32_t {
    barrier = 1,
    all_reduce,
    reduce_scatter,
    all_gather,
    all_gather_v,
    broadcast,
    reduce,
    gather,
    scatter,
    all_to_all,
    send,
    recv,
};

[[nodiscard]] std::string_view name_of(Collective collective);
[[nodiscard]] std::string_view name_of(ReduceOp op);

// Which fields a collective uses is what tessera/comm.h says of its function. In-place lists are in `outputs`.
struct Request {
    Collective collective = Collective::barrier;
    std::span<const Tensor> inputs;
    std::span<const Tensor> outputs;
    ReduceOp op = ReduceOp::none;
    int peer = -1;  // root, destination or source
    int tag = 0;
    std::string_view label;  // "bucket 5", in messages; lives as long as the program or the communicator
};

}  // namespace tsr
