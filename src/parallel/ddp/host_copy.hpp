// The copy of parameters and moments that the ranks of a host share: its memory, the meetings of the ranks, and the
// stamps that show whether all of it is at one step.
//
//     stamp of a rank:  begun = done = k     its slice is at step k
//                       begun > done         its slice is being changed, or its rank died while changing it
//
// A step of the host's ranks: all meet (from now on no rank reads what will change) - begun = k + 1 - each changes its
// slice - done = k + 1 - all meet (from now on every rank may read). Between the two meetings a rank touches only its
// own slice. Each meeting is a collective, which orders all memory accesses before it on one rank before all accesses
// after it on the others.
//
// Owned by the model; called by one thread at a time: the progress thread in a step, the trainer's thread between
// steps. check_whole: any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/host_ranks.hpp"
#include "optim/optimizer.hpp"
#include "parallel/ddp/reducer.hpp"
#include "tensor/shared_copy.hpp"

namespace tsr {

class HostCopy final : public SharedCopy {
   public:
    // Collective over `comm`.
    explicit HostCopy(const std::shared_ptr<Communicator>& comm);

    [[nodiscard]] int place() const override { return host_.place(); }
    [[nodiscard]] int places() const override { return host_.places(); }
    // Whether all ranks are on this host.
    [[nodiscard]] bool is_alone() const { return host_.is_alone(); }

    [[nodiscard]] std::shared_ptr<std::byte> allocate(size_t size) override { return host_.allocate(size); }
    // Returns when all ranks of the host have called it.
    void meet(std::string_view label);
    // Runs a body that meets; if it fails, the ranks that wait for this one get the error.
    void together(const std::function<void()>& body);

    // begin_step: this rank is about to change its slice in the step after `steps` steps; throws if the others have
    // given this rank up since they met. end_step: it has changed all of its slice.
    void begin_step(int64_t steps);
    void end_step(int64_t steps);
    // This rank knows that all ranks have ended the step.
    void know_ended(int64_t steps) { known_.store(steps + 1, std::memory_order_relaxed); }

    void check_whole() const override;
    // The step of all slices, counted from the model's creation; CORRUPT if they differ or if it is not the last step
    // that this rank ended.
    [[nodiscard]] int64_t step() const;

    void agree_to_load(uint32_t what) override;
    void begin_load() override;
    void end_load(const std::optional<Error>& error) override;

    // This rank's part of the parameters of a bucket.
    [[nodiscard]] std::vector<ParamSlice> slice_of(const BucketView& bucket) const;

   private:
    struct alignas(64) Stamp {
        std::atomic<int64_t> begun;
        std::atomic<int64_t> done;
    };
    [[nodiscard]] Stamp& stamp_of(int place) const;
    [[nodiscard]] std::vector<int64_t> gather(int64_t own, std::string_view label);
    void mark_begun(int64_t step);

    const std::shared_ptr<Communicator> comm_;
    HostRanks host_;
    std::shared_ptr<Buffer> stamps_;
    std::atomic<int64_t> known_{0};  // the last step that this rank ended; written by one thread, read by any
};

}  // namespace tsr
