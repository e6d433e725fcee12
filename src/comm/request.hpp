// A request to a communicator: one collective or point-to-point operation, as plain values. A synchronous call builds
// it on the stack over the caller's tensors; an asynchronous one is copied into an OwnedRequest.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
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
    finalize,  // a barrier that matches only finalize on the other ranks
    compute,   // Communicator::record, in flight records
};

[[nodiscard]] std::string_view name_of(Collective collective);
[[nodiscard]] std::string_view name_of(ReduceOp op);

// tessera/comm.h documents which fields each collective uses. In-place lists are in `outputs`; inputs[i] and outputs[i]
// of an all_gather or a reduce_scatter belong together.
struct Request {
    Collective collective = Collective::barrier;
    std::span<const Tensor> inputs;
    std::span<const Tensor> outputs;
    ReduceOp op = ReduceOp::none;
    int peer = -1;  // root, destination or source
    int tag = 0;
    std::string_view label;  // "bucket 5", in messages; lives as long as the program or the communicator
    void* stream = nullptr;  // of the tensors' device
    bool of_turn = false;    // a turn's own (turn.hpp), which alone may run until the turn ends
};

[[nodiscard]] inline bool is_point_to_point(Collective c) { return c == Collective::send || c == Collective::recv; }

// The tensors are on another device than the CPU. All of a valid request are on one.
[[nodiscard]] inline bool is_on_device(const Request& request) {
    const auto first = request.inputs.empty() ? request.outputs : request.inputs;
    return !first.empty() && first[0].device.type != DeviceType::cpu;
}

// Throws INVALID_ARGUMENT or UNSUPPORTED for a request that rank `rank` of `world_size` cannot make in a communicator for
// tensors on the CPU and, if there is one, on `device`. Faults that show only across ranks (different counts) are detected by
// the transport. Returns whether its tensors are on the device.
bool validate(const Request& request, int rank, int world_size, const std::optional<Device>& device);

// How a rank describes its current operation to its peers: plain data. The fingerprints are equal if and only if the
// ranks agree (except for hash collisions, 2^-64); they cover the length of each tensor of a list, and the label.
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
// The part of an all_gather's output that receives the input of each of `ranks` ranks.
[[nodiscard]] std::vector<Tensor> gathered_parts(const Tensor& input, const Tensor& output, size_t ranks);
// The operations of Communicator::allocate and Communicator::record.
[[nodiscard]] Operation allocation_of(size_t size);
[[nodiscard]] Operation computation_of(std::string_view label);

// "all_reduce of 100 f32 (sum)", "broadcast of 50 f64 from rank 0"
[[nodiscard]] std::string describe(const Operation& operation);
// "all_reduce #412 (bucket 5, 25.0 MiB)"
[[nodiscard]] std::string headline(const Operation& operation, uint64_t sequence);

// A request that owns its lists of tensors; the caller still owns the tensors' memory.
struct OwnedRequest {
    explicit OwnedRequest(const Request& request);

    [[nodiscard]] Request view() const;
    [[nodiscard]] bool is_on_device() const { return on_device_; }

   private:
    Request fields_;
    std::vector<Tensor> inputs_;
    std::vector<Tensor> outputs_;
    bool on_device_;
};

}  // namespace tsr
