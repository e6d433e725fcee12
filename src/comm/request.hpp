// What a rank asks of its communicator: one collective or point-to-point operation, as plain values. A synchronous
// call builds it on the stack over the caller's tensors; an asynchronous one is copied into an OwnedRequest.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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
    allocate,  // Communicator::allocate, in messages
    finalize,  // a barrier that only a finalize of the others meets
};

[[nodiscard]] std::string_view name_of(Collective collective);
[[nodiscard]] std::string_view name_of(ReduceOp op);

// Which fields a collective uses is what tessera/comm.h says of its function. In-place lists are in `outputs`; inputs[i] and
// outputs[i] of an all_gather or a reduce_scatter belong together.
struct Request {
    Collective collective = Collective::barrier;
    std::span<const Tensor> inputs;
    std::span<const Tensor> outputs;
    ReduceOp op = ReduceOp::none;
    int peer = -1;  // root, destination or source
    int tag = 0;
    std::string_view label;  // "bucket 5", in messages; lives as long as the program or the communicator
};

[[nodiscard]] inline bool is_point_to_point(Collective c) { return c == Collective::send || c == Collective::recv; }

// Throws INVALID_ARGUMENT or UNSUPPORTED for a request that rank `rank` of `world_size` cannot make. What only the peers
// can know to be wrong (counts that differ) is found by the transport.
void validate(const Request& request, int rank, int world_size);

// What a rank tells its peers of the operation that it is in: plain data. The fingerprint is equal if and (but for hash
// collisions of 2^-64) only if the ranks agree; it covers the length of each tensor of a list, and the label.
struct Operation {
    Collective collective = Collective::barrier;
    int32_t dtype = 0;  // 0: none
    ReduceOp op = ReduceOp::none;
    int32_t peer = -1;
    int32_t tag = 0;
    uint32_t tensors = 0;
    uint64_t count = 0;  // elements: of the list, or of this rank's input (scatter, recv: output)
    uint64_t fingerprint = 0;
    std::array<char, 32> label{};

    [[nodiscard]] uint64_t size_bytes() const;
};

[[nodiscard]] Operation operation_of(const Request& request);
// Where each of `ranks` ranks' input goes in the output of an all_gather.
[[nodiscard]] std::vector<Tensor> gathered_parts(const Tensor& input, const Tensor& output, size_t ranks);
// Of Communicator::allocate.
[[nodiscard]] Operation allocation_of(size_t size);

// "all_reduce of 100 f32 (sum)", "broadcast of 50 f64 from rank 0"
[[nodiscard]] std::string describe(const Operation& operation);
// "all_reduce #412 (bucket 5, 25.0 MiB)"
[[nodiscard]] std::string headline(const Operation& operation, uint64_t sequence);

// A request that owns its lists of tensors; the tensors' memory stays the caller's.
struct OwnedRequest {
    explicit OwnedRequest(const Request& request);

    [[nodiscard]] Request view() const;

   private:
    Request fields_;
    std::vector<Tensor> inputs_;
    std::vector<Tensor> outputs_;
};

}  // namespace tsr
