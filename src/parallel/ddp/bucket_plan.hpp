// Decides which gradients are reduced together, from sizes and an order alone, so that every rank computes the same
// plan without communication. Parameters are taken in the order in which a backward pass finishes them: at first in
// reverse order of registration, after a rebuild in rank 0's order of arrival. A bucket holds one dtype of one device
// and closes as soon as it reaches its limit. The first plan also lays out the gradients in memory, one after another,
// each at a multiple of 64 bytes:
//
//     bucket 0 (f32)                           bucket 1 (f32)
//     | fc2.bias | pad | fc2.weight     |      | fc1.bias | fc1.weight             |
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "tensor/tensor.hpp"

namespace tsr {

struct BucketLimits {
    size_t first_bytes;  // first bucket of each dtype and device: small, so that communication begins early
    size_t bytes;        // all other buckets
};

struct Bucket {
    struct Slot {
        size_t param;   // registration index
        size_t offset;  // bytes from the start of the bucket
    };
    DType dtype = DType::f32;
    std::vector<Slot> slots;
    size_t size = 0;  // bytes, padding included; 0 if every parameter in it is empty
};

inline constexpr size_t slot_alignment = 64;  // a cache line, and the widest vector

// n - 1 to 0: the order in which a backward pass finishes parameters that were registered in forward order.
[[nodiscard]] std::vector<size_t> reverse_order(size_t n);

// Buckets in launch order: the order in which gradients that arrive in `order`, a permutation, complete them.
[[nodiscard]] std::vector<Bucket> plan_buckets(std::span<const Tensor> params, BucketLimits limits,
                                               std::span<const size_t> order);

// "bucket 5"; valid for the life of the program.
[[nodiscard]] std::string_view bucket_label(size_t index);

}  // namespace tsr
