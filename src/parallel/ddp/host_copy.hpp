// The one copy of parameters and moments that the ranks of a host share: its memory, where the ranks meet, and the stamps
// that tell whether all of it is of one step.
//
//     stamp of a rank:  begun = done = k     its slice is as of step k
//                       begun > done         it is being changed, or its rank ended while it was
//
// A step of the host's ranks: all meet (from here on nobody reads what is going to change) - begun = k + 1 - each changes its
// slice - done = k + 1 - all meet (from here on everybody may read). Between the two meetings a rank touches no slice but
// its own; each meeting is a collective, which orders all memory before it on one rank ahead of all after it on the others.
//
// Owned by the model; called by the thread whose turn it is, the progress thread in a step, the trainer's between steps.
// check_whole: any thread.
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
    // The ranks of the host are all there are.
    [[nodiscard]] bool is_alone() const { return host_.is_alone(); }

    [[nodiscard]] std::shared_ptr<std::byte> allocate(size_t size) override { return host_.allocate(size); }
    // Returns when all ranks of the host have called it.
    void meet(std::string_view label);
    // Runs what meets: if it fails, the others that wait for this rank learn it.
    void together(const std::function<void()>& body);

    // This rank is about to change its slice in the step after `steps` ones, unless the others have given it up since they
    // met, which throws; it has changed all of it.
    void begin_step(int64_t steps);
    void end_step(int64_t steps);
    // This rank knows that all have.
    void know_ended(int64_t steps) { known_.store(steps + 1, std::memory_order_relaxed); }

    void check_whole() const override;
    // The step, counted from the model's creation, that all slices are of; CORRUPT if they differ, or if it is not the one
    // that this rank has ended.
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
    std::atomic<int64_t> known_{0};  // the step that this rank has ended; of one thread, read by any
};

}  // namespace tsr
