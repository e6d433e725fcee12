// What becomes of one bucket's gradients when all of them are there: an all-reduce, one in another dtype, PowerSGD, a
// hook, or nothing. It owns the memory of the gradients. All of it runs in jobs of the communicator's progress thread, one
// after the other; between steps, when none is queued, the model's thread may change what is here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "optim/optimizer.hpp"
#include "parallel/ddp/options.hpp"
#include "parallel/ddp/power_sgd.hpp"

namespace tsr {

// A bucket as a hook sees it.
struct BucketView {
    size_t bucket = 0;
    std::vector<size_t> params;  // indices of registration, in the order of their gradients' memory
    std::vector<Tensor> grads;   // of each of them
    std::vector<Tensor> ranges;  // the same memory with its padding, neighbours joined
    [[nodiscard]] size_t size_bytes() const;
};

// Leaves in `grads` what every rank shall have.
using BucketHook = std::function<void(const BucketView& bucket)>;

class Reducer {
   public:
    struct Times {
        Clock::time_point ready;
        Clock::time_point start;
        Clock::time_point end;
    };
    // What a rank that has no data left, or another that has, says before a step.
    enum class Presence : uint8_t { joined = 0, steps = 1, broadcasts_buffers = 2 };

    // Collective: allocates `size` bytes for gradients.
    Reducer(std::shared_ptr<Communicator> comm, const DdpOptions& options, size_t size);

    [[nodiscard]] std::byte* memory() const { return memory_->data(); }
    void zero_memory();

    // Between steps. Collective: the scratch memory of conversions is allocated.
    void set_buckets(std::vector<BucketView> buckets);
    void set_hook(BucketHook hook) { hook_ = std::move(hook); }

    [[nodiscard]] const std::vector<BucketView>& buckets() const { return buckets_; }
    // Between steps, and `ready` of a bucket before it is queued.
    [[nodiscard]] std::vector<Times>& times() { return times_; }
    // One byte a parameter: whether this rank has a gradient; after share_used(), whether any rank has.
    [[nodiscard]] std::vector<uint8_t>& used() { return used_; }

    // Collective, for the thread whose turn it is: what all ranks are about to do. Returns how many ranks have not
    // joined; MISMATCH if they are about to do different things.
    int announce(Presence own);
    [[nodiscard]] Presence all_do() const { return all_do_; }  // of the ranks that have not joined
    [[nodiscard]] int first_active() const { return first_active_; }

    // Jobs.
    void reduce(size_t bucket, int64_t step);
    // Whether it is a sum of what lies in the ranks' memory and no more, so that a rank can make a part of it, once all
    // have the bucket: the same bits.
    [[nodiscard]] bool can_reduce_parts() const;
    // Of slices of a bucket's gradients, of `dtype`: hands out one part after the other, reduced, while it is in the cache.
    using TakeSlice = std::function<void(const ParamSlice& reduced)>;
    void reduce_slices(std::span<const ParamSlice> slices, DType dtype, const TakeSlice& take);
    void share_used();

   private:
    void reduce_in_dtype(const BucketView& bucket);
    void all_reduce(std::span<const Tensor> tensors, ReduceOp op, std::string_view label);
    [[nodiscard]] int divisor() const;

    const std::shared_ptr<Communicator> comm_;
    const DdpOptions options_;
    const std::shared_ptr<Buffer> memory_;
    const size_t size_;
    std::vector<BucketView> buckets_;
    std::vector<Times> times_;
    std::shared_ptr<Buffer> scratch_;  // of one bucket in reduce_dtype
    size_t scratch_size_ = 0;
    BucketHook hook_;
    std::optional<PowerSgd> power_sgd_;
    std::vector<uint8_t> used_;
    int active_;
    int first_active_ = 0;
    Presence all_do_ = Presence::steps;
};

}  // namespace tsr
