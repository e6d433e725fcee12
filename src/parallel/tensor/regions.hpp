// The collectives between the regions of a tensor-parallel model, along any dimension of an activation. A cut dimension
// is split like torch.chunk, so its size need not divide by the number of ranks; what a rank holds may be empty.
//
// Where the transport cannot read or write a tensor's parts in place (an inner dimension, an uneven split) they pass
// through memory of the communicator, which grows to the largest of them. Ranks that share memory read each other's
// parts there, so that each byte is copied once to where others see it, and once to where it belongs.
//
// On a CUDA device nothing waits for the device: operations go onto a stream (on_device.hpp).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/communicator.hpp"
#include "device/device.hpp"
#include "device/growing_memory.hpp"
#include "parallel/tensor/cut.hpp"
#include "parallel/tensor/on_device.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// Throws INVALID_ARGUMENT unless `bias` has the size of the last dimension of `out`.
void check_bias(const Tensor& out, const Tensor& bias);
// On a device this takes kernels: UNSUPPORTED without them.
void add_to_rows(const Tensor& out, const Tensor& bias, StreamHandle stream);

// Moves activations: on the CPU at once, on the calling thread, on a device in the order of the stream. All tensors of a call
// are contiguous and of one dtype and device. Collective, except copy and split. Throws INVALID_ARGUMENT for shapes that do not
// belong together.
class TpMoves {
   public:
    explicit TpMoves(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)) {}

    void copy(const Tensor& in, const Tensor& out, StreamHandle stream) const;
    // `out` is the sum of all ranks' `in`, which may be the same memory.
    void sum(const Tensor& in, const Tensor& out, StreamHandle stream);
    // `out` has all ranks' parts of dimension `dim`, in rank order.
    void gather(const Tensor& in, const Tensor& out, int dim, StreamHandle stream);
    // `out` is this rank's part, along `dim`, of the sum of all ranks' `in`.
    void sum_scatter(const Tensor& in, const Tensor& out, int dim, StreamHandle stream);
    // `out` is this rank's part of `in`.
    void split(const Tensor& in, const Tensor& out, int dim, StreamHandle stream) const;

    // One rank's part of a gather: `part` has that of the rank `place`, contiguous; along an inner dimension it is then
    // copied to where it belongs in `out`.
    void share_part(const Tensor& in, const Tensor& part, const Tensor& out, int dim, int place, StreamHandle stream);
    // One rank's part of a sum_scatter: the rank `place` gets the sum of all ranks' `part` in `out`.
    void sum_part(const Tensor& part, const Tensor& out, int place, StreamHandle stream);

    // Throws INVALID_ARGUMENT or UNSUPPORTED unless all tensors are on the CPU, or in memory of the communicator's device
    // like the stream.
    void check_places(std::span<const Tensor> tensors, StreamHandle stream) const;
    // What the operations above check first.
    void check_same(const Tensor& in, const Tensor& out) const;
    enum class Part { in, out };  // which of the two is this rank's part of the other
    void check_part(const Tensor& in, const Tensor& out, Part part, int dim) const;

    // Memory of this process, until the next call of this function for the same device; there for operations in the order
    // of the model (TpStreams). Throws INVALID_STATE for a captured stream, as do other operations that need such memory: a
    // graph would use it at any time.
    [[nodiscard]] Tensor temporary(const Dims& shape, DType dtype, Device device, StreamHandle stream);

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return comm_; }

   private:
    // Memory that peers on this host read without a copy. All ranks ask for the same sizes in the same order.
    [[nodiscard]] std::byte* scratch(size_t size);
    // The same, or memory of the device.
    [[nodiscard]] std::byte* scratch(size_t size, Device device, StreamHandle stream);
    // The scratch memory of this call, of each rank; empty if the ranks do not share memory, as on a device. A call's
    // memory is not that of the one before, which peers may still read: they have when they meet in this call.
    [[nodiscard]] std::vector<std::byte*> shared_scratch(size_t size, Device device);
    // Returns when all ranks have come with the same cut.
    void meet(std::string_view what, const Cut& cut);

    std::shared_ptr<Communicator> comm_;
    std::shared_ptr<Buffer> scratch_;
    size_t turn_ = 0;  // of the halves of shared scratch memory
    std::shared_ptr<std::byte> temporary_;
    size_t temporary_size_ = 0;
    GrowingMemory scratch_on_device_;
    GrowingMemory temporary_on_device_;
};

// Runs moves in the order of the calls. Owned by one thread.
class TpQueue {
   public:
    explicit TpQueue(std::shared_ptr<Communicator> comm) : moves_(std::make_shared<TpMoves>(std::move(comm))) {}

    // On the CPU, without `work`: on this thread, once what was issued before is done. With it: as a job of the
    // communicator; `*work` is what to wait for. On a device this thread runs it either way, and it goes onto the given stream
    // or, with `work`, onto one of the model's after what the given one has now.
    // There `verify`, unless it is empty, is called once the device is done, as Communicator::track does.
    using Body = std::function<void(TpMoves& moves, StreamHandle stream)>;
    void run(Body body, StreamHandle stream, Device device, WorkPtr* work, std::function<void()> verify = {});
    // For a body that puts operations on several streams of the device itself. If the device fails, the communicator ends.
    void run_on_device(Device device, FunctionRef<void(TpMoves& moves, TpStreams& streams)> body);
    // A word for kernels of that device.
    [[nodiscard]] std::shared_ptr<unsigned> flag(Device device) { return streams_of(device).flags().take(); }

    [[nodiscard]] const TpMoves& moves() const { return *moves_; }

   private:
    [[nodiscard]] TpStreams& streams_of(Device device);

    std::shared_ptr<TpMoves> moves_;      // jobs keep it
    WorkPtr last_;                        // the job issued last
    std::unique_ptr<TpStreams> streams_;  // from the first operation on a device; they end before the memory
};

}  // namespace tsr
