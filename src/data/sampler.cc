#include "data/sampler.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/splitmix64.hpp"

namespace tsr {

std::vector<int64_t> shuffled_order(uint64_t seed, int64_t epoch, int64_t length) {
    SplitMix64 random(SplitMix64::mix(SplitMix64::mix(seed) + static_cast<uint64_t>(epoch)));
    std::vector<int64_t> order(static_cast<size_t>(length));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    return order;
}

Sampler::Sampler(int rank, int world_size, int64_t length, const SamplerOptions& options)
    : rank_(rank), world_size_(world_size), length_(length), options_(options) {
    if (world_size < 1 || rank < 0 || rank >= world_size) {
        throw Error(Code::invalid_argument, fmt::format("rank {} is out of range for world size {}", rank, world_size));
    }
    if (length < 1) {
        throw Error(Code::invalid_argument, fmt::format("the sampler's length is {}; it must be at least 1", length));
    }
    if (options.drop_last && length < world_size) {
        throw Error(Code::invalid_argument,
                    fmt::format("drop_last would drop all {} samples of the data set, because there are {} ranks",
                                length, world_size));
    }
}

size_t Sampler::next(std::span<int64_t> indices) {
    if (indices.empty()) throw Error(Code::invalid_argument, "the batch size is 0; it must be at least 1");
    if (options_.shuffle && order_epoch_ != epoch_) {
        order_ = shuffled_order(options_.seed, epoch_, length_);
        order_epoch_ = epoch_;
    }
    const int64_t left = length_ - consumed_;
    const int64_t left_per_rank = options_.drop_last ? left / world_size_ : (left + world_size_ - 1) / world_size_;
    const int64_t count = std::min(static_cast<int64_t>(indices.size()), left_per_rank);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t place = (consumed_ + i * world_size_ + rank_) % length_;
        indices[static_cast<size_t>(i)] = options_.shuffle ? order_[static_cast<size_t>(place)] : place;
    }
    last_count_ = count;
    last_consumed_ = consumed_;
    move_to(epoch_, std::min(length_, consumed_ + count * world_size_));
    return static_cast<size_t>(count);
}

void Sampler::last_valid(std::span<uint8_t> valid) const {
    if (static_cast<int64_t>(valid.size()) != last_count_) {
        throw Error(Code::invalid_argument, fmt::format("the mask has {} places, but the last batch has {} samples",
                                                        valid.size(), last_count_));
    }
    for (int64_t i = 0; i < last_count_; ++i) {
        valid[static_cast<size_t>(i)] = last_consumed_ + i * world_size_ + rank_ < length_ ? 1 : 0;
    }
}

// Moves past the end of an epoch, so that the position always names a sample still to be taken.
void Sampler::move_to(int64_t epoch, int64_t consumed) {
    const int64_t left = length_ - consumed;
    const bool used_up = options_.drop_last ? left < world_size_ : left == 0;
    epoch_ = used_up ? epoch + 1 : epoch;
    consumed_ = used_up ? 0 : consumed;
}

void Sampler::set_epoch(int64_t epoch) {
    if (epoch < 0) throw Error(Code::invalid_argument, fmt::format("epoch is {}; it must not be negative", epoch));
    move_to(epoch, 0);
}

SamplerState Sampler::state() const {
    return {length_, options_.seed, options_.shuffle, options_.drop_last, epoch_, consumed_};
}

void Sampler::load_state(const SamplerState& saved) {
    const auto must_match = [](const char* what, auto saved_value, auto own_value) {
        if (saved_value == own_value) return;
        throw Error(Code::mismatch,
                    fmt::format("the saved position belongs to a sampler with {} {}, but this one has {}; "
                                "create the sampler with the saved options",
                                what, saved_value, own_value));
    };
    must_match("length", saved.length, length_);
    must_match("seed", saved.seed, options_.seed);
    must_match("shuffle", saved.shuffle, options_.shuffle);
    must_match("drop_last", saved.drop_last, options_.drop_last);
    if (saved.epoch < 0 || saved.consumed < 0 || saved.consumed > length_) {
        throw Error(Code::mismatch,
                    fmt::format("the saved position, epoch {} sample {}, is outside a data set of {} samples",
                                saved.epoch, saved.consumed, length_));
    }
    move_to(saved.epoch, saved.consumed);
}

}  // namespace tsr
