// Random numbers by Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The number of an
// element depends on the seed, the stream and the element's row-major index in the whole tensor alone, so any part of a
// tensor has the bits of the whole. Element i takes the words 2 (i % 2) and 2 (i % 2) + 1 of the block whose counter is
// (i / 2, stream) and whose key is the seed, each with its lower 32 bits first. Everything after that is f64 arithmetic
// that IEEE 754 defines exactly, rounded once to the dtype; compiled with -ffp-contract=off, so that every build and
// every vector width gives the same bits.
#pragma once

#include <array>
#include <cstdint>

#include "base/vectors.hpp"
#include "tensor/layout.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

[[nodiscard]] std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// The `k`-quantile of the upper tail of the standard normal distribution, by Wichura's algorithm AS 241, for 0 < k < 0.5.
[[nodiscard]] double upper_normal_quantile(double k);

// Which numbers, and for which elements.
struct RandomPart {
    uint64_t seed = 0;
    uint64_t stream = 0;
    const Layout* layout = nullptr;  // nullptr: of the whole tensor
    int rank = 0;                    // the boxes of this rank, one after another
    Vectors vectors = widest_vectors();
};

// Each throws INVALID_ARGUMENT for a dtype or numbers that it cannot have, and for a tensor that is not of the size of
// the part; UNSUPPORTED if it is not on the CPU.

// In [low, high), also after rounding; `low` if both are equal. Floating-point dtypes.
void fill_uniform(const Tensor& output, const RandomPart& part, double low, double high);
// By the inverse of the cumulative distribution. Floating-point dtypes.
void fill_normal(const Tensor& output, const RandomPart& part, double mean, double deviation);
// 1 with probability p, otherwise 0. Floating-point dtypes, integers and bool.
void fill_bernoulli(const Tensor& output, const RandomPart& part, double p);

}  // namespace tsr
