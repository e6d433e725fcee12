/* Tessera: data-parallel training. The trainer says which gradients are ready; buckets are averaged meanwhile. */
#ifndef TESSERA_DDP_H
#define TESSERA_DDP_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of DDP. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_ddp_options {
    size_t struct_size;
    size_t bucket_bytes;       /* a bucket closes when it reaches this; default 25 MiB */
    size_t first_bucket_bytes; /* the same for the first bucket of each dtype; default 1 MiB */
    int32_t op;                /* TSR_REDUCE_AVG (default) or TSR_REDUCE_SUM */
} tsr_ddp_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_ddp_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_options_init(tsr_ddp_options *options, size_t struct_size);

/** Register the parameters of a model, check that all ranks registered the same ones, and give every rank the values
 *  of rank 0. A leading "module." or "_orig_mod." of a name is stripped.
 *  @param comm     borrowed until destroy
 *  @param params   n contiguous floating-point tensors with different names; the structs are borrowed for the call, the
 *                  tensors' memory until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the DDP object
 *  @return TSR_OK, INVALID_ARGUMENT, MISMATCH (names the first difference), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_create(tsr_comm *comm, const tsr_param *params, size_t n,
                                               const tsr_ddp_options *options, tsr_ddp **out);

/** The number of parameters.
 *  @param ddp    borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_param_count(const tsr_ddp *ddp, size_t *count);

/** Parameter `index` as it was registered.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @param param  out: name and shape borrowed until destroy, data the caller's own
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_param(const tsr_ddp *ddp, size_t index, tsr_param *param);

/** The gradient of parameter `index`: a contiguous view into a bucket, zero at first. The same memory at every step.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @param grad   out: memory and shape borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_grad(const tsr_ddp *ddp, size_t index, tsr_tensor *grad);

/** Say that gradient `index` is written. In any order; each once a step. The view must not be touched until
 *  tsr_ddp_wait returns. A full bucket is reduced in the background, buckets in the same order on every rank.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (said twice; the message names the parameter), ABORTED
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_ready(tsr_ddp *ddp, size_t index);

/** Say that every gradient not yet said is written.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE, ABORTED
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_ready_all(tsr_ddp *ddp);

/** The end of backward: returns when every gradient is the average (or sum) over the ranks.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (names the parameters that were never said ready; the step may be completed and
 *          waited for again), TIMEOUT, ABORTED, PEER_LOST, MISMATCH, INTERRUPTED
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_wait(tsr_ddp *ddp);

/** Set every gradient to zero.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (between a ready and its wait)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_zero_grad(tsr_ddp *ddp);

/** Free the DDP object. NULL is taken. Gradient views end here; optimizers made from it must be destroyed before.
 *  @param ddp  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_ddp_destroy(tsr_ddp *ddp);

#ifdef __cplusplus
}
#endif
#endif
