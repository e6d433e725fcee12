// Reduces the gradients of a full bucket: by an all-reduce, possibly in another dtype, by PowerSGD, by a hook, or not
// at all. It owns the memory of the gradients. Everything runs in jobs of the communicator's progress thread, one after
// another; between steps, when no job is queued, the model's thread may change this object.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "optim/optimizer.hpp"
#include "parallel/ddp/device_grads.hpp"
#include "parallel/ddp/options.hpp"
#include "parallel/ddp/power_sgd.hpp"
#include "parallel/tensor/grad_parts.hpp"

namespace tsr {

// A bucket as a hook sees it.
struct BucketView {
    size_t bucket = 0;
    std::vector<size_t> params;     // registration indices, in memory order of their gradients
    std::vector<Tensor> grads;      // one per parameter
    std::vector<Tensor> ranges;     // the same memory with padding, adjacent gradients merged
    StreamHandle stream = nullptr;  // of gradients on a device: in its order they are written and to be reduced
    [[nodiscard]] size_t size_bytes() const;
};

// Writes the final reduced gradients into `grads`.
using BucketHook = std::function<void(const BucketView& bucket)>;

class Reducer {
   public:
    struct Times {
        Clock::time_point ready;
        Clock::time_point start;
        Clock::time_point end;
    };
    // What a rank, with or without data left, announces before a step.
    enum class Presence : uint8_t { joined = 0, steps = 1, broadcasts_buffers = 2 };

    // Collective: allocates `size` bytes for gradients, unless they are on a device.
    Reducer(std::shared_ptr<Communicator> comm, const DdpOptions& options, size_t size,
            std::shared_ptr<DeviceGrads> device);

    [[nodiscard]] std::byte* memory() const { return device_ ? device_->memory() : memory_->data(); }
    // Null if the gradients are on the CPU.
    [[nodiscard]] DeviceGrads* device() const { return device_.get(); }
    // On a device, on the trainer's stream.
    void zero_memory();

    // Between steps. Collective, unless the gradients are on a device: allocates the scratch memory for conversions.
    void set_buckets(std::vector<BucketView> buckets);
    void set_hook(BucketHook hook) { hook_ = std::move(hook); }
    // What is summed over a tensor-parallel group before the reduction; may be null.
    void set_parts(std::shared_ptr<GradParts> parts) { parts_ = std::move(parts); }

    [[nodiscard]] const std::vector<BucketView>& buckets() const { return buckets_; }
    // Access between steps, and to `ready` of a bucket before it is queued.
    [[nodiscard]] std::vector<Times>& times() { return times_; }
    // One byte per parameter: whether this rank has a gradient; after share_used(), whether any rank has one.
    [[nodiscard]] std::vector<uint8_t>& used() { return used_; }

    // Collective: announces what this rank is about to do. Returns the number of ranks that have not joined; MISMATCH
    // if they are about to do different things.
    int announce(Presence own);
    [[nodiscard]] Presence all_do() const { return all_do_; }  // of the ranks that have not joined
    [[nodiscard]] int first_active() const { return first_active_; }

    // Jobs.
    void reduce(size_t bucket, int64_t step);
    // Whether the reduction is a plain sum or average over the ranks' memory, so that a rank can compute a part of it,
    // with the same bits, once all have the bucket.
    [[nodiscard]] bool can_reduce_parts() const;
    // Reduces slices of a bucket's gradients, of `dtype`, and passes on one part after another while it is in the
    // cache.
    using TakeSlice = std::function<void(const ParamSlice& reduced)>;
    void reduce_slices(std::span<const ParamSlice> slices, DType dtype, const TakeSlice& take);
    void share_used();

   private:
    void sum_parts(const BucketView& bucket) const;
    void reduce_in_dtype(const BucketView& bucket);
    void reduce_on_device(const BucketView& bucket);
    void all_reduce(std::span<const Tensor> tensors, ReduceOp op, std::string_view label);
    // The transport's operation, and the quotients around it.
    struct Scaling {
        double before = 1;
        ReduceOp op;
        double after = 1;
    };
    [[nodiscard]] Scaling scaling_of(ReduceOp op) const;
    [[nodiscard]] int divisor() const;

    const std::shared_ptr<Communicator> comm_;
    const DdpOptions options_;
    const std::shared_ptr<DeviceGrads> device_;
    const std::shared_ptr<Buffer> memory_;  // on the CPU
    const size_t size_;
    std::vector<BucketView> buckets_;
    std::vector<Times> times_;
    std::shared_ptr<Buffer> scratch_;  // holds one bucket in reduce_dtype
    size_t scratch_size_ = 0;
    BucketHook hook_;
    std::shared_ptr<GradParts> parts_;
    std::optional<PowerSgd> power_sgd_;
    std::vector<uint8_t> used_;
    int active_;
    int first_active_ = 0;
    Presence all_do_ = Presence::steps;
};

}  // namespace tsr
