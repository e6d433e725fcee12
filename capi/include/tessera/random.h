/* Tessera: random numbers that do not depend on how a tensor is distributed. The number of an element follows from the
 * seed, the stream and the element's index in the whole tensor alone: a slice, a shard or any box has, bit for bit, the
 * numbers that the same call writes into the whole tensor on one device, on every machine and by every build.
 *
 *     tsr_random_normal(&slice.tensor, 7, 0, 0, 0.02, layout, rank)    initialises this rank's slice
 *     tsr_random_bernoulli(&mask, 7, step, 0.9, NULL, 0)               a dropout mask that all ranks share
 *
 * Element i (its row-major index, up to 2^63) of stream s with seed k takes 64 bits of its own of Philox4x32-10 (Salmon
 * et al. 2011): words 2 (i % 2) and 2 (i % 2) + 1 of the block with the counter (i / 2, s) and the key k, lower words
 * first. They are not the numbers of PyTorch's generator.
 *
 * `output` and `layout` of each call: without a layout, `output` is the whole tensor. With one it is what `rank` holds of
 * the layout's tensor, its boxes one after another, as slices (tsr_tp_slice) and shards (tsr_fsdp_shard) have them: in the
 * shape that the boxes make along dimension 0, or in one dimension. It may be empty. */
#ifndef TESSERA_RANDOM_H
#define TESSERA_RANDOM_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Fill with uniformly distributed numbers from `low` to below `high`: low + u (high - low) in f64, where u has 53 bits,
 *  rounded once to the dtype and then kept within the range. All are `low` if it equals `high`.
 *  @param output  f16, bf16, f32 or f64, contiguous; borrowed for the call
 *  @param seed    any number: different seeds give unrelated numbers
 *  @param stream  any number: likewise, for example the step of the training
 *  @param low     finite in the dtype of `output`
 *  @param high    likewise, and at least `low`
 *  @param layout  NULL: `output` is the whole tensor; borrowed for the call
 *  @param rank    whose part of the layout `output` is; without a layout it is not used
 *  @return TSR_OK, INVALID_ARGUMENT (also: the dtype has no number in the range; a wrong shape, and which is needed),
 *          INVALID_STATE, UNSUPPORTED (not on the CPU)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_random_uniform(const tsr_tensor *output, uint64_t seed, uint64_t stream, double low,
                                                   double high, const tsr_layout *layout, int32_t rank);

/** Fill with normally distributed numbers: mean + deviation z in f64, rounded once to the dtype, where z is the quantile
 *  of the element's bits (52 bits and a sign, so |z| is at most 8.3).
 *  @param output     f16, bf16, f32 or f64, contiguous; borrowed for the call
 *  @param seed       any number: different seeds give unrelated numbers
 *  @param stream     any number: likewise, for example the step of the training
 *  @param mean       finite in the dtype of `output`
 *  @param deviation  the standard deviation: likewise, and at least 0
 *  @param layout     NULL: `output` is the whole tensor; borrowed for the call
 *  @param rank       whose part of the layout `output` is; without a layout it is not used
 *  @return TSR_OK, INVALID_ARGUMENT (also: a wrong shape, and which is needed), INVALID_STATE, UNSUPPORTED (not on the
 *          CPU)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_random_normal(const tsr_tensor *output, uint64_t seed, uint64_t stream, double mean,
                                                  double deviation, const tsr_layout *layout, int32_t rank);

/** Fill with 1 with the probability `p`, otherwise 0: a dropout mask that keeps a share `p`. An element is 1 where
 *  tsr_random_uniform from 0 to 1 gives, in f64, a number below `p`.
 *  @param output  f16, bf16, f32, f64, an integer dtype or bool, contiguous; borrowed for the call
 *  @param seed    any number: different seeds give unrelated numbers
 *  @param stream  any number: likewise, for example the step of the training
 *  @param p       0 to 1
 *  @param layout  NULL: `output` is the whole tensor; borrowed for the call
 *  @param rank    whose part of the layout `output` is; without a layout it is not used
 *  @return TSR_OK, INVALID_ARGUMENT (also: a wrong shape, and which is needed), INVALID_STATE, UNSUPPORTED (not on the
 *          CPU)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_random_bernoulli(const tsr_tensor *output, uint64_t seed, uint64_t stream, double p,
                                                     const tsr_layout *layout, int32_t rank);

#ifdef __cplusplus
}
#endif
#endif
