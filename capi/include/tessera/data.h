/* Tessera: the distributed sampler: which samples this rank takes next. */
#ifndef TESSERA_DATA_H
#define TESSERA_DATA_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of a sampler. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_sampler_options {
    size_t struct_size;
    uint64_t seed;    /* the shuffle seed, the same on every rank; default 0 */
    tsr_flag shuffle; /* 1 (default): a new order each epoch; 0: 0, 1, 2, ... */
    /* 0 (default): an incomplete last step of an epoch is filled up from the epoch's beginning; 1: it is dropped */
    tsr_flag drop_last;
} tsr_sampler_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_sampler_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sampler_options_init(tsr_sampler_options *options, size_t struct_size);

/** Create a sampler of `length` samples over the ranks of `comm`. The order of an epoch depends only on seed, epoch and
 *  length, not on the world size, so training can continue in mid-epoch at another world size.
 *  @param comm     borrowed for the call (rank and world size are read)
 *  @param length   number of samples in the data set, at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the sampler
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sampler_create(const tsr_comm *comm, int64_t length,
                                                   const tsr_sampler_options *options, tsr_sampler **out);

/** This rank's next batch. All ranks must ask for the same size in the same order. It moves on to the next epoch when
 *  one is used up; a batch never spans two epochs, so the last batch of an epoch may be shorter (equally on all ranks).
 *  @param sampler  borrowed for the call
 *  @param indices  out: at least `size` numbers
 *  @param size     number of samples requested on this rank, at least 1
 *  @param count    out: number of samples returned, 1 to size
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sampler_next(tsr_sampler *sampler, int64_t *indices, size_t size, size_t *count);

/** Which indices of this rank's last batch are new samples. The others fill up the last step of an epoch and repeat samples
 *  that some rank has taken already: metrics leave them out (tsr_metric_update).
 *  @param sampler  borrowed for the call
 *  @param valid    out: 1 for a sample, 0 for what fills up; NULL if size is 0
 *  @param size     the count that tsr_sampler_next returned last; 0 before the first batch
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sampler_valid(const tsr_sampler *sampler, uint8_t *valid, size_t size);

/** The epoch that the next batch belongs to, and how many of its samples all ranks together have taken.
 *  @param sampler   borrowed for the call
 *  @param epoch     out, may be NULL: from 0
 *  @param consumed  out, may be NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sampler_position(const tsr_sampler *sampler, int64_t *epoch, int64_t *consumed);

/** Go to the beginning of `epoch`.
 *  @param sampler  borrowed for the call
 *  @param epoch    not negative
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sampler_set_epoch(tsr_sampler *sampler, int64_t epoch);

/** Free the sampler. NULL is ignored.
 *  @param sampler  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_sampler_destroy(tsr_sampler *sampler);

#ifdef __cplusplus
}
#endif
#endif
