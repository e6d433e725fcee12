// Tensor-parallel training: each rank of a group computes with a slice of a model's parameters. The plan (plan.hpp) says
// how each parameter is cut; between the regions that it creates, activations are gathered, summed or split
// (regions.hpp). The trainer multiplies; this object holds the slices and moves the bytes.
//
// Slices and gradients are on the CPU or, like the parameters, all on the communicator's CUDA device. Activations may be on
// either. Operations on a device go onto the stream of the call, or of the model (set_stream) where a call has none, and no
// call waits for the device, except for the constructor.
//
// Owned by one thread.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.hpp"
#include "base/reentry.hpp"
#include "comm/mesh.hpp"
#include "optim/optimizer.hpp"
#include "parallel/params.hpp"
#include "parallel/tensor/grad_parts.hpp"
#include "parallel/tensor/plan.hpp"
#include "parallel/tensor/regions.hpp"

namespace tsr {

struct TpOptions {
    bool sync_values = true;         // slices are cut from rank 0's values; false: each rank cuts its own
    bool sequence_parallel = false;  // between regions, activations are cut along the sequence
};

class TensorParallel {
   public:
    // Collective over the mesh, which has one dimension: checks that the ranks' plans are equal and cuts the values, on a
    // device in the order of its default stream. A
    // parameter whose data is nullptr on rank 0 (without sync_values: on this rank) gets zeros. Tensors are read only in
    // the constructor; leading "module." and "_orig_mod." of names are stripped.
    TensorParallel(const DeviceMesh& mesh, std::span<const NamedTensor> params, std::span<const TpRule> rules,
                   const TpOptions& options);
    ~TensorParallel();
    static void check_mesh(const DeviceMesh& mesh);  // throws INVALID_ARGUMENT unless it has one dimension
    TensorParallel(const TensorParallel&) = delete;
    TensorParallel& operator=(const TensorParallel&) = delete;

    [[nodiscard]] const std::shared_ptr<Communicator>& comm() const { return moves().comm(); }
    [[nodiscard]] size_t params() const { return plan_.size(); }
    [[nodiscard]] const TpParam& param(size_t index) const;

    // This rank's slice, and its gradient; valid for the life of the object. Gradients begin as zeros.
    [[nodiscard]] Tensor slice(size_t index) const;
    [[nodiscard]] const Dims& slice_shape(size_t index) const;
    [[nodiscard]] Tensor grad(size_t index);  // INVALID_STATE unless the parameter is a floating-point tensor
    // Where the slice lies, over all ranks from which the mesh was created.
    [[nodiscard]] Held held(size_t index) const;

    // For a model over these slices, replicated or sharded over ranks with other data (DDP, FSDP). The ranks with equal
    // slices are numbered in the order of the mesh's other dimensions.
    void check_data_ranks(const Communicator& data) const;  // throws INVALID_ARGUMENT unless `data` has those ranks
    // The index of the parameter with this name, and the same for a slice; throws INVALID_ARGUMENT if there is none or it
    // has another shape or dtype.
    [[nodiscard]] size_t find(const std::string& name) const;
    [[nodiscard]] size_t find_slice(const NamedTensor& slice) const;
    // Where this rank's part of its slice lies, if the rank at `place` of the group, with data rank `data_rank`, holds
    // these boxes of its slice; 0 `data_replica`: it is the first data rank that holds its part.
    using PartsOf = FunctionRef<std::vector<Box>(int place, int data_rank)>;
    [[nodiscard]] Held held_within(size_t index, int data_replica, PartsOf parts_of) const;

    // Sums gradients of a model whose parameters are those with the indices `of`; nullptr if none has one in parts.
    // Collective.
    [[nodiscard]] std::shared_ptr<GradParts> grad_parts(std::span<const size_t> of);

    // The stream of the model's device in whose order gradients are summed and zeroed; what the former one has of that comes
    // first. Initially its default stream.
    void set_stream(StreamHandle stream);

    // Activations. `dim` is the dimension along which they are cut outside of the region; -1: they are whole there.
    // Each `_backward` is the adjoint: it takes the gradient of what the other returned. If `work` is not null, a call
    // returns at once and its tensors must live until the work is done; on a device calls return at once anyway.

    // Into a region, where each rank has all of an activation.
    void enter(const Tensor& in, const Tensor& out, int dim, StreamHandle stream, WorkPtr* work);
    void enter_backward(const Tensor& grad, const Tensor& out, int dim, StreamHandle stream, WorkPtr* work);
    // Out of a region, in which each rank computed a summand. `bias` is added once, after the sum; it has the size of the
    // last dimension.
    void leave(const Tensor& in, const Tensor& out, int dim, const Tensor* bias, StreamHandle stream, WorkPtr* work);
    void leave_backward(const Tensor& grad, const Tensor& out, int dim, StreamHandle stream, WorkPtr* work);
    // enter and leave with a dimension, part by part in the order of ranks: `compute` is called while later parts are on
    // their way, or earlier ones. In the former with the part of a rank, which has come; in the latter to write this
    // rank's summand of the part of a rank. `begin` is its first index along `dim`, `size` is that of the whole dimension. Parts are contiguous, and their memory
    // is theirs until `compute` returns; empty ones are left out. `compute` must not use this object. If it throws,
    // enter_parts first moves the rest, and leave_parts aborts the communicator. On a device a part has come, and its memory is
    // theirs, in the order of the stream, onto which `compute` puts what it does.
    using PartFn = FunctionRef<void(int place, int64_t begin, const Tensor& part)>;
    void enter_parts(const Tensor& in, const Tensor& out, int dim, StreamHandle stream, PartFn compute);
    void leave_parts(const Tensor& out, int64_t size, int dim, const Tensor* bias, StreamHandle stream, PartFn compute);
    // All ranks' parts along `dim`, and back. Each is the other's adjoint.
    void gather(const Tensor& in, const Tensor& out, int dim, StreamHandle stream, WorkPtr* work);
    void split(const Tensor& in, const Tensor& out, int dim, StreamHandle stream) const;

    // Sums over the ranks the gradients of which each rank has a part (TpParam::sums_grad). Once a step, after backward. On a
    // device, what uses the gradients must be ordered after the work.
    void sum_grads(WorkPtr* work);
    // Throws INVALID_STATE while gradients are being summed; `what` begins the message.
    void check_idle(const char* what) const;
    // The same for an optimizer's step, and if gradients that need it were not summed since `steps` sums.
    void check_reduced_after(int64_t steps) const;
    [[nodiscard]] int64_t synced_steps() const { return sums_; }
    void zero_grad();

    // For operations of other files.
    [[nodiscard]] TpQueue& queue() { return queue_; }
    [[nodiscard]] const TpMoves& moves() const { return queue_.moves(); }

   private:
    void enter_parts_on_device(const Tensor& in, const Tensor& out, int dim, StreamHandle stream, PartFn compute);
    void leave_parts_on_device(const Tensor& whole, const Tensor& out, int dim, const Tensor* bias, StreamHandle stream,
                               PartFn compute);
    void allocate_slices();
    void cut_own(std::span<const NamedTensor> params);
    void scatter(std::span<const NamedTensor> params);
    void scatter_some(std::span<const NamedTensor> params, std::span<const size_t> which);
    [[nodiscard]] bool has_grad_in_parts(size_t index) const {
        return plan_[index].sums_grad && is_floating(plan_[index].dtype);
    }
    [[nodiscard]] int place_of(int rank) const;  // of the mesh that this group's is a slice of
    [[nodiscard]] int data_rank_of(int rank) const;
    [[nodiscard]] Layout layout_of(size_t index, PartsOf parts_of) const;
    [[nodiscard]] size_t slice_size(size_t index, int rank) const;
    [[nodiscard]] std::byte* part_memory(size_t size);
    [[nodiscard]] DeviceApi& api() const { return device_api(device_); }
    [[nodiscard]] Reentry enter_call() const { return {this, "the model of communicator", comm()->name()}; }

    TpOptions options_;
    Device device_;  // of slices and gradients
    std::vector<TpParam> plan_;
    // The mesh from which this group's was sliced, and what is needed to say what each of its ranks holds.
    DeviceMesh mesh_;
    TpQueue queue_;
    std::vector<Dims> shapes_;  // of the slices
    std::vector<size_t> at_;    // the offset in bytes of each slice, and of its gradient
    size_t size_ = 0;
    std::shared_ptr<std::byte> slices_;
    std::shared_ptr<std::byte> grads_;  // from the first use of one
    StreamHandle stream_ = nullptr;
    int64_t sums_ = 0;
    std::shared_ptr<std::byte> parts_;  // of enter_parts and leave_parts
    size_t parts_size_ = 0;
    WorkPtr summing_;  // the sum issued last, unless its call waited for it or it is on a device
};

}  // namespace tsr
