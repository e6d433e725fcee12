// The distributed sampler: which samples each rank takes next. All ranks advance together through one global order of
// the epoch, `size * world` samples per step; rank r takes every world-th of them, starting with the r-th. The position
// is one number, the samples that all ranks together have taken, so training can continue in mid-epoch at any world
// size without losing or repeating a sample.
//
// The order of an epoch depends only on (seed, epoch, length): Fisher-Yates from the last place down, driven by
// SplitMix64 with the state mix(mix(seed) + epoch). Any language can reproduce it; it never changes within a major
// version, because checkpoints hold positions in it. Owned by one thread; other threads may call const methods between
// its calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tsr {

struct SamplerOptions {
    uint64_t seed = 0;
    bool shuffle = true;
    bool drop_last = false;
};

// The state saved in a checkpoint. `epoch` and `consumed` are the position; the rest identifies the order.
struct SamplerState {
    int64_t length = 0;
    uint64_t seed = 0;
    bool shuffle = true;
    bool drop_last = false;
    int64_t epoch = 0;
    int64_t consumed = 0;
    friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

class Sampler {
   public:
    Sampler(int rank, int world_size, int64_t length, const SamplerOptions& options);

    // Writes this rank's next samples to the front of `indices` and returns their number: indices.size(), or fewer at
    // the end of an epoch (the same on every rank). Without drop_last, the epoch's last step is filled up from the
    // beginning of its order; with it, a rest of fewer than world_size samples is dropped.
    size_t next(std::span<int64_t> indices);

    // Writes, for each index of the last batch, 1 if it is a new sample of this epoch, 0 if it fills up the epoch's last step.
    // `valid` is as long as that batch.
    void last_valid(std::span<uint8_t> valid) const;

    // The epoch that the next batch belongs to, and how many of its samples all ranks together have taken.
    [[nodiscard]] int64_t epoch() const { return epoch_; }
    [[nodiscard]] int64_t consumed() const { return consumed_; }
    void set_epoch(int64_t epoch);

    [[nodiscard]] SamplerState state() const;
    // Throws MISMATCH, and changes nothing, if the state belongs to another order than this sampler's.
    void load_state(const SamplerState& state);

   private:
    void move_to(int64_t epoch, int64_t consumed);

    int64_t rank_;
    int64_t world_size_;
    int64_t length_;
    SamplerOptions options_;
    int64_t epoch_ = 0;
    int64_t consumed_ = 0;
    int64_t last_count_ = 0;      // of the last batch
    int64_t last_consumed_ = 0;   // before it
    std::vector<int64_t> order_;  // of epoch order_epoch_; empty without shuffle
    int64_t order_epoch_ = -1;    // -1: none yet
};

// The order of one epoch: a permutation of 0 .. length - 1.
[[nodiscard]] std::vector<int64_t> shuffled_order(uint64_t seed, int64_t epoch, int64_t length);

}  // namespace tsr
