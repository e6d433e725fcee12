/* Tessera: data-parallel training. The trainer says which gradients are ready; buckets are averaged meanwhile.
 *
 * A step: write gradients, tsr_ddp_ready for each, tsr_ddp_wait. All ranks reduce the same buckets in the same order,
 * whatever the order of ready; every rank gets the same bits. docs/DDP.md tells what each option does and costs. */
#ifndef TESSERA_DDP_H
#define TESSERA_DDP_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What reduces a bucket. */
enum {
    TSR_DDP_HOOK_ALL_REDUCE = 0,
    TSR_DDP_HOOK_POWER_SGD = 1, /* matrices as products of low rank, with error feedback; docs/DDP.md */
    TSR_DDP_HOOK_NOOP = 2       /* nothing: each rank keeps its own gradients, to see what communication costs */
};
typedef int32_t tsr_ddp_hook_kind;

/** Ranks with different numbers of steps: what the sum of those that still have data is divided by. */
enum {
    TSR_DDP_JOIN_OFF = 0, /* all ranks make equally many steps */
    TSR_DDP_JOIN_DIVIDE_BY_WORLD = 1,
    TSR_DDP_JOIN_DIVIDE_BY_ACTIVE = 2 /* by the number of ranks that have not joined */
};
typedef int32_t tsr_ddp_join_kind;

/** Options of DDP, the same on every rank. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_ddp_options {
    size_t struct_size;
    size_t bucket_bytes;       /* a bucket of gradients closes when it reaches so many bytes; default 25 MiB */
    size_t first_bucket_bytes; /* the same for the first bucket of each dtype; default 1 MiB */
    tsr_reduce_op op;          /* what becomes of the ranks' gradients: TSR_REDUCE_AVG (default) or TSR_REDUCE_SUM */
    double pre_divide;         /* each rank divides its gradients by this before they are summed, and what is left of
                                     the average (or sum) is made up for afterwards: sums of f16 stay in range;
                                     default 1 */
    tsr_flag find_unused;      /* 1: gradients that are not ready at tsr_ddp_wait are unused by this rank, which adds
                                     zeros; those that no rank used stay as they are; default 0: they are an error */
    tsr_flag static_graph;     /* 1: every step uses the parameters of the first one; default 0 */
    tsr_flag rebuild_buckets;  /* 1: after the first step, buckets follow the order in which rank 0's gradients were
                                     ready; default 0. Gradients keep their memory */
    tsr_dtype reduce_dtype;    /* TSR_DTYPE_ of floating point: gradients are converted to it, reduced, and converted
                                     back; 0 (default): reduced as they are */
    tsr_ddp_hook_kind
        hook; /* what reduces a bucket; default TSR_DDP_HOOK_ALL_REDUCE. tsr_ddp_set_hook brings one of your own */
    int32_t powersgd_rank;       /* the rank of the products that stand for gradients; default 1 */
    int32_t powersgd_start_step; /* reductions before this one are whole; default 1000 */
    tsr_ddp_join_kind
        join; /* whether ranks may have different numbers of steps, and by what their sum is divided when some have joined; but for TSR_DDP_JOIN_OFF (default) a step begins with one byte from each rank. See tsr_ddp_join */
    tsr_flag share_params; /* 1: the ranks of a host have one copy of the parameters and of the optimizer's state,
                                     of which each updates a slice; default 0. What changes then: docs/DDP.md */
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
 *                  tensors' memory until destroy, or for the call with share_params: tsr_ddp_param tells where the
 *                  parameters are then
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the DDP object
 *  @return TSR_OK, INVALID_ARGUMENT, UNSUPPORTED (share_params with what it cannot be combined with), MISMATCH (names the
 *          first difference), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_create(tsr_comm *comm, const tsr_param *params, size_t n,
                                               const tsr_ddp_options *options, tsr_ddp **out);

/** The number of parameters.
 *  @param ddp    borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_param_count(const tsr_ddp *ddp, size_t *count);

/** Parameter `index` as it was registered; with share_params, where it is in the host's copy.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @param param  out: name and shape borrowed until destroy, data the caller's own or, with share_params, the model's,
 *                borrowed until destroy: 64-aligned, written by the optimizer and by loads alone
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_param(const tsr_ddp *ddp, size_t index, tsr_param *param);

/** The gradient of parameter `index`: a contiguous view into a bucket, zero at first. The same memory at every step, also
 *  after buckets were rebuilt.
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
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (said twice, or not a parameter of the static graph; the message
 *          names it), ABORTED
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_ready(tsr_ddp *ddp, size_t index);

/** Say that every gradient not yet said is written.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (called twice in one step: tsr_ddp_wait ends it), ABORTED
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_ready_all(tsr_ddp *ddp);

/** The end of backward: returns when every gradient is the average (or sum) over the ranks. Without synchronisation
 *  (tsr_ddp_set_sync) it returns at once.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (names the parameters that were never said ready; the step may be completed and
 *          waited for again), TIMEOUT, ABORTED, PEER_LOST, MISMATCH, INTERRUPTED (wait again), USER (a hook failed;
 *          native code is what it returned)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_wait(tsr_ddp *ddp);

/** Whether the following steps reduce. Without, `ready` and `wait` reduce nothing and need not be called for every
 *  parameter: the trainer adds gradients to those that are in the views. The first step with synchronisation reduces the
 *  sums; a parameter that had a gradient in any of these steps counts as used.
 *  @param ddp   borrowed for the call
 *  @param sync  1 (as created) or 0; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a step)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_set_sync(tsr_ddp *ddp, tsr_flag sync);

/** Whether any rank used parameter `index` in the last step that was reduced. If none did, its gradient was left alone.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @param used   out: 1 or 0; 0 before the first step
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a step)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_used(tsr_ddp *ddp, size_t index, tsr_flag *used);

/** The number of buckets, which a rebuild may change.
 *  @param ddp    borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_bucket_count(tsr_ddp *ddp, size_t *count);

/** A bucket in the last step that was reduced. Times are nanoseconds since the step's first `ready` on this rank. */
typedef struct tsr_bucket_stats {
    size_t struct_size;
    size_t size_bytes;  /* padding included */
    size_t params;      /* how many it holds */
    int64_t ready_ns;   /* its last gradient was ready */
    int64_t start_ns;   /* its reduction began */
    int64_t end_ns;     /* its reduction was done */
    int64_t exposed_ns; /* of tsr_ddp_wait's time, what was spent waiting for this bucket: not hidden by backward */
} tsr_bucket_stats;

/** What became of bucket `bucket` in the last step that was reduced; times are 0 before the first step, and after one that
 *  rebuilt the buckets.
 *  @param ddp     borrowed for the call
 *  @param bucket  0 to bucket count - 1, in the order of reduction
 *  @param stats   out: `struct_size` set by the caller to sizeof(tsr_bucket_stats); that many bytes are written
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_stats(tsr_ddp *ddp, size_t bucket, tsr_bucket_stats *stats);

/** A bucket whose gradients are all there. All of it is borrowed for the call of the hook. */
typedef struct tsr_ddp_bucket {
    size_t bucket;           /* 0 to bucket count - 1 */
    size_t n;                /* how many gradients it holds */
    const size_t *params;    /* the indices of their parameters */
    const tsr_tensor *grads; /* the gradients, of one dtype, to be changed in place */
    tsr_comm *comm;          /* the model's ranks: synchronous calls run at once, asynchronous ones are INVALID_STATE */
} tsr_ddp_bucket;

/** Reduces a bucket: leaves in its gradients what every rank shall have (it averages itself), by collectives that are the
 *  same on every rank. Runs on a thread of the library, bucket after bucket. Other than 0 fails the step on every rank:
 *  here with USER and that number as native code, or with the error of the collective of `comm` that failed. */
typedef int32_t (*tsr_ddp_hook_fn)(const tsr_ddp_bucket *bucket, void *user_data);

/** Let `fn` reduce the buckets of the following steps in place of what the options say. Also called on a rank that has
 *  joined, with gradients of zero.
 *  @param ddp           borrowed for the call
 *  @param fn            the hook, or NULL: what the options say; on every rank alike
 *  @param user_data     handed to fn, borrowed until destroy_data
 *  @param destroy_data  frees user_data once the hook is replaced or the model gone, and no bucket that is still in the
 *                       queue needs it; may be NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a step; destroy_data is not called)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_set_hook(tsr_ddp *ddp, tsr_ddp_hook_fn fn, void *user_data,
                                                 tsr_destroy_fn destroy_data);

/** Let an optimizer of this model update the parameters of a bucket as soon as it is reduced, in the background; after
 *  tsr_ddp_wait all are updated, to the same bits as by tsr_optimizer_step afterwards. That call is INVALID_STATE then,
 *  as are, in the middle of a step, changes of its settings. A step that fails may have updated some buckets.
 *  @param ddp        borrowed for the call
 *  @param optimizer  made of this model by tsr_ddp_sgd, tsr_ddp_adam or tsr_ddp_adamw; steps until it is destroyed
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a step, or another one steps already)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_step_in_backward(tsr_ddp *ddp, tsr_optimizer *optimizer);

/** The step, counted from the model's creation, that the copy which this host's ranks share is of as a whole: for the
 *  survivors of a rank's death, who ask once they have met again, all of them. If it is whole and of one step on all hosts
 *  it may be saved, or registered anew; otherwise it is discarded and the last checkpoint loaded.
 *  @param ddp    borrowed for the call; its step may have failed
 *  @param steps  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (without share_params, or in the middle of a step), CORRUPT (slices
 *          are of different steps, which the message tells, or not of the one that this rank ended)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_shared_step(tsr_ddp *ddp, int64_t *steps);

/** Register what a model has besides parameters (running means, counters), check that all ranks registered the same, and
 *  give every rank the values of rank 0. Once a model.
 *  @param ddp      borrowed for the call
 *  @param buffers  n contiguous tensors of any dtype; the structs are borrowed for the call, the memory until destroy
 *  @param n        at least 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_register_buffers(tsr_ddp *ddp, const tsr_param *buffers, size_t n);

/** Give every rank the buffers of rank 0 (of the lowest rank that has not joined), all in one broadcast: before a forward
 *  pass.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (none registered, or in the middle of a step), MISMATCH, TIMEOUT, ABORTED, PEER_LOST
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_broadcast_buffers(tsr_ddp *ddp);

/** This rank has no data left: take part in the steps of the others, adding zeros, until all ranks have joined. Every rank
 *  calls it once it has no data, however many steps it made; then a new round of steps may begin. Gradients are zero
 *  afterwards. Needs the option `join`.
 *  @param ddp          borrowed for the call
 *  @param sync_params  1: if ranks made different numbers of steps, all get the parameters and buffers of the lowest rank
 *                      that made most; 0: each keeps its own. The same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (without the option, or in the middle of a step), MISMATCH, TIMEOUT
 *          (between two steps of the others, too), ABORTED, PEER_LOST, INTERRUPTED (the model is out of use)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_join(tsr_ddp *ddp, tsr_flag sync_params);

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
