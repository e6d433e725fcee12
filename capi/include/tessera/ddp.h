/* Tessera: data-parallel training. The trainer marks gradients ready; full buckets are averaged in the background.
 *
 * A step: write gradients, tsr_ddp_ready for each, tsr_ddp_wait. All ranks reduce the same buckets in the same order,
 * in whatever order gradients become ready, and every rank gets the same bits. docs/DDP.md describes what each option
 * does and costs.
 *
 * Parameters are all on the CPU, or all on the CUDA device of a communicator with the backend "cpu:auto,cuda:nccl". On a
 * device the gradients are there too, and everything goes in the order of one stream of the trainer (tsr_ddp_set_stream):
 * it writes gradients on that stream and then marks them ready, and what it puts on the stream after tsr_ddp_wait sees
 * the reduced ones. No call of a step waits for the device. Memory of the host is never read or written there. */
#ifndef TESSERA_DDP_H
#define TESSERA_DDP_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What reduces a bucket. */
enum {
    TSR_DDP_HOOK_ALL_REDUCE = 0,
    TSR_DDP_HOOK_POWER_SGD = 1, /* low-rank compression of matrices with error feedback; docs/DDP.md */
    TSR_DDP_HOOK_NOOP = 2 /* no reduction: each rank keeps its own gradients, to measure the cost of communication */
};
typedef int32_t tsr_ddp_hook_kind;

/** Ranks with different numbers of steps: the divisor of the sum over the ranks that still have data. */
enum {
    TSR_DDP_JOIN_OFF = 0, /* all ranks make the same number of steps */
    TSR_DDP_JOIN_DIVIDE_BY_WORLD = 1,
    TSR_DDP_JOIN_DIVIDE_BY_ACTIVE = 2 /* the number of ranks that have not joined */
};
typedef int32_t tsr_ddp_join_kind;

/** Options of DDP, the same on every rank. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_ddp_options {
    size_t struct_size;
    size_t bucket_bytes;       /* a bucket of gradients closes when it reaches this many bytes; default 25 MiB */
    size_t first_bucket_bytes; /* the same for the first bucket of each dtype; default 1 MiB */
    tsr_reduce_op op;          /* how the ranks' gradients are reduced: TSR_REDUCE_AVG (default) or TSR_REDUCE_SUM */
    /* each rank divides its gradients by this before they are summed; the remaining factor of the average (or sum) is
     * applied afterwards, which keeps f16 sums in range; default 1 */
    double pre_divide;
    /* 1: gradients that are not ready at tsr_ddp_wait are unused by this rank, which adds zeros; those that no rank
     * used stay unchanged; default 0: they are an error */
    tsr_flag find_unused;
    tsr_flag static_graph; /* 1: every step uses the same parameters as the first one; default 0 */
    /* 1: after the first step, buckets follow the order in which rank 0's gradients became ready; default 0. Gradients
     * keep their memory */
    tsr_flag rebuild_buckets;
    /* TSR_DTYPE_ of floating point: gradients are converted to it, reduced, and converted back; 0 (default): reduced in
     * their own dtype */
    tsr_dtype reduce_dtype;
    /* how a bucket is reduced; default TSR_DDP_HOOK_ALL_REDUCE. For a hook of your own, see tsr_ddp_set_hook */
    tsr_ddp_hook_kind hook;
    int32_t powersgd_rank;       /* the rank of the matrix products that approximate gradients; default 1 */
    int32_t powersgd_start_step; /* reductions before this step are not compressed; default 1000 */
    /* whether ranks may make different numbers of steps, and the divisor once some have joined; with any value but
     * TSR_DDP_JOIN_OFF (default) a step begins with one byte from each rank. See tsr_ddp_join */
    tsr_ddp_join_kind join;
    /* 1: the ranks of a host share one copy of the parameters and of the optimizer's state, and each updates a slice of
     * it; default 0. For what changes then, see docs/DDP.md */
    tsr_flag share_params;
    /* NULL (default), or the tensor-parallel model whose slices the parameters are, by name: `comm` has the ranks with
     * the same slices, such as a mesh's "dp". Optimizers, norms and states are then those of the whole model, and
     * tsr_tp_sum_grads is not needed. Borrowed until destroy */
    tsr_tp *tp;
} tsr_ddp_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_ddp_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_options_init(tsr_ddp_options *options, size_t struct_size);

/** Register the parameters of a model, check that all ranks registered the same ones, and copy the values of rank 0 to
 *  every rank. A leading "module." or "_orig_mod." of a name is stripped.
 *  @param comm     borrowed until destroy
 *  @param params   n contiguous floating-point tensors with unique names, all on the CPU or all on the communicator's
 *                  CUDA device, where they are written in the order of the default stream; the structs are borrowed for
 *                  the call, the tensors' memory until destroy (with share_params only for the call; tsr_ddp_param
 *                  returns where the parameters are then)
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the DDP object
 *  @return TSR_OK, INVALID_ARGUMENT (also: in several places, or on another device), UNSUPPORTED (share_params with an
 *          option or dtype that it does not support; on a device: an option that is not available there, or a
 *          communicator without CUDA), MISMATCH (names the first difference), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY,
 *          CUDA, NCCL
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_create(tsr_comm *comm, const tsr_param *params, size_t n,
                                               const tsr_ddp_options *options, tsr_ddp **out);

/** The number of parameters.
 *  @param ddp    borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_param_count(const tsr_ddp *ddp, size_t *count);

/** Parameter `index` as registered; with share_params, its place in the host's copy.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @param param  out: name and shape borrowed until destroy, data the caller's own or, with share_params, the model's,
 *                borrowed until destroy, aligned to 64 bytes, written only by the optimizer and by loads
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_param(const tsr_ddp *ddp, size_t index, tsr_param *param);

/** The gradient of parameter `index`: a contiguous view into a bucket, on the parameter's device, initially zero. It is
 *  the same memory at every step, even after buckets are rebuilt.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @param grad   out: memory and shape borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_grad(const tsr_ddp *ddp, size_t index, tsr_tensor *grad);

/** Mark gradient `index` ready: it is written, or on a device, its writes are on the stream. Call it once per gradient
 *  and step, in any order. Do not touch the view until tsr_ddp_wait returns. A full bucket is reduced in the background;
 *  buckets are reduced in the same order on every rank.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (marked twice, or not a parameter of the static graph; the message
 *          names it), ABORTED; on a device also why the step before it failed there
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_ready(tsr_ddp *ddp, size_t index);

/** Mark every gradient ready that is not ready yet.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (called twice in one step; tsr_ddp_wait ends the step), ABORTED
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_ready_all(tsr_ddp *ddp);

/** End of backward: returns when every gradient is the average (or sum) over the ranks. On a device it returns when all
 *  reductions are launched, and the trainer's stream waits for them; what fails there after that is the result of a
 *  later call. Without synchronisation (tsr_ddp_set_sync) it returns immediately.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (names the parameters never marked ready; complete the step and wait again), TIMEOUT,
 *          ABORTED, PEER_LOST, MISMATCH, INTERRUPTED (wait again), USER (a hook failed; the native code is its return
 *          value), CUDA, NCCL
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_wait(tsr_ddp *ddp);

/** Name the stream of the trainer: it writes gradients there and uses the reduced ones. A new stream continues after what the
 *  model did on the previous one.
 *  @param ddp     borrowed for the call
 *  @param stream  of the parameters' device (cudaStream_t), borrowed until another is set or destroy; NULL, as created:
 *                 the device's default stream
 *  @return TSR_OK, INVALID_ARGUMENT (of another device, or not NULL and the parameters are on the CPU), INVALID_STATE
 *          (during a step), CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_set_stream(tsr_ddp *ddp, void *stream);

/** Set whether the following steps reduce gradients. Without synchronisation, tsr_ddp_ready and tsr_ddp_wait reduce
 *  nothing and need not be called for every parameter: the trainer adds its gradients to the views. The first step with
 *  synchronisation reduces the sums; a parameter that had a gradient in any of these steps counts as used.
 *  @param ddp   borrowed for the call
 *  @param sync  1 (as created) or 0; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a step)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_set_sync(tsr_ddp *ddp, tsr_flag sync);

/** Whether any rank used parameter `index` in the last reduced step. If none did, its gradient was left unchanged.
 *  @param ddp    borrowed for the call
 *  @param index  0 to count - 1
 *  @param used   out: 1 or 0; 0 before the first step
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a step)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_used(tsr_ddp *ddp, size_t index, tsr_flag *used);

/** The number of buckets. A rebuild may change it.
 *  @param ddp    borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_bucket_count(tsr_ddp *ddp, size_t *count);

/** Statistics of a bucket in the last reduced step. Times are nanoseconds since the first tsr_ddp_ready of the step on
 *  this rank; on a device, by its clock: from when the trainer's stream got there. */
typedef struct tsr_bucket_stats {
    size_t struct_size;
    size_t size_bytes; /* padding included */
    size_t params;     /* number of parameters in the bucket */
    int64_t ready_ns;  /* its last gradient was ready */
    int64_t start_ns;  /* its reduction began */
    int64_t end_ns;    /* its reduction ended */
    /* time that tsr_ddp_wait spent waiting for this bucket, not hidden by backward; on a device, that the trainer's
     * stream did */
    int64_t exposed_ns;
} tsr_bucket_stats;

/** Statistics of bucket `bucket` in the last reduced step. Times are 0 before the first step and after a step that
 *  rebuilt the buckets. On a device, the first call after a step waits for it.
 *  @param ddp     borrowed for the call
 *  @param bucket  0 to bucket count - 1, in the order of reduction
 *  @param stats   out: `struct_size` set by the caller to sizeof(tsr_bucket_stats); that many bytes are written
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, INTERRUPTED, CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_stats(tsr_ddp *ddp, size_t bucket, tsr_bucket_stats *stats);

/** A full bucket. All of it is borrowed for the call of the hook. */
typedef struct tsr_ddp_bucket {
    size_t bucket;           /* 0 to bucket count - 1 */
    size_t n;                /* number of gradients in the bucket */
    const size_t *params;    /* the indices of their parameters */
    const tsr_tensor *grads; /* the gradients, of one dtype, to be reduced in place */
    tsr_comm *comm; /* the model's ranks: synchronous calls run immediately, asynchronous ones are INVALID_STATE */
    /* of gradients on a device: the model's stream, on which they are written; the hook's collectives and kernels belong
     * on it, and what it has when the hook returns is the reduction. NULL on the CPU */
    void *stream;
} tsr_ddp_bucket;

/** Reduces a bucket: writes the final gradients in place, using the same collectives on every rank. The hook does its
 *  own averaging. It runs on a thread of the library, one bucket after another. A result other than 0 fails the step on
 *  every rank: on this rank with USER and the result as native code, or with the error of the collective of `comm` that
 *  failed. */
typedef int32_t (*tsr_ddp_hook_fn)(const tsr_ddp_bucket *bucket, void *user_data);

/** Let `fn` reduce the buckets of the following steps instead of the `hook` option. It is also called on a rank that
 *  has joined, with zero gradients.
 *  @param ddp           borrowed for the call
 *  @param fn            the hook; NULL: the `hook` option again. The same on every rank
 *  @param user_data     passed to fn; borrowed until destroy_data
 *  @param destroy_data  frees user_data once the hook is replaced or the model destroyed, and no queued bucket needs
 *                       it; may be NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a step; destroy_data is not called)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_set_hook(tsr_ddp *ddp, tsr_ddp_hook_fn fn, void *user_data,
                                                 tsr_destroy_fn destroy_data);

/** Let an optimizer of this model update the parameters of a bucket in the background as soon as it is reduced. After
 *  tsr_ddp_wait all parameters are updated, to the same bits as with a later tsr_optimizer_step. tsr_optimizer_step is
 *  then INVALID_STATE, and so is changing the optimizer's settings during a step. A step that fails may have updated
 *  some buckets.
 *  @param ddp        borrowed for the call
 *  @param optimizer  created from this model by tsr_ddp_sgd, tsr_ddp_adamw or another such function; it steps until it is
 *                    destroyed
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a step, or another optimizer already steps), UNSUPPORTED (the
 *          parameters are on a device, or the optimizer is a Lamb and they are slices of a tsr_tp)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_step_in_backward(tsr_ddp *ddp, tsr_optimizer *optimizer);

/** The step, counted from the model's creation, of the copy that this host's ranks share. It is for the survivors of a
 *  rank's death: all of them call it after they have met again. If the copy is consistent and at the same step on all
 *  hosts, it may be saved or registered again; otherwise discard it and load the last checkpoint.
 *  @param ddp    borrowed for the call; its step may have failed
 *  @param steps  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (without share_params, or during a step), CORRUPT (the slices are at
 *          different steps, which the message lists, or not at the step that this rank finished)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_shared_step(tsr_ddp *ddp, int64_t *steps);

/** Register the buffers of a model (running means, counters), check that all ranks registered the same ones, and copy
 *  the values of rank 0 to every rank. Call it once per model.
 *  @param ddp      borrowed for the call
 *  @param buffers  n contiguous tensors of any dtype, on the CPU or on the parameters' device, written there in the order
 *                  of the trainer's stream; the structs are borrowed for the call, the memory until destroy
 *  @param n        at least 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, UNSUPPORTED (on a device, but the parameters are on the CPU),
 *          MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY, CUDA, NCCL
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_register_buffers(tsr_ddp *ddp, const tsr_param *buffers, size_t n);

/** Copy the buffers of rank 0 (or of the lowest rank that has not joined) to every rank in one broadcast. Call it
 *  before a forward pass. Those on a device are copied in the order of the trainer's stream, which the call does not
 *  wait for.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (no buffers registered, or during a step), MISMATCH, TIMEOUT, ABORTED, PEER_LOST
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_broadcast_buffers(tsr_ddp *ddp);

/** Join the steps of the other ranks, adding zeros, because this rank has no data left; returns when all ranks have
 *  joined. Every rank calls it when it runs out of data, however many steps it made; then a new round of steps may
 *  begin. Gradients are zero afterwards. Requires the option `join`.
 *  @param ddp          borrowed for the call
 *  @param sync_params  1: if ranks made different numbers of steps, all get the parameters and buffers of the lowest
 *                      rank that made the most; 0: each keeps its own. The same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (without the option, or during a step), MISMATCH, TIMEOUT (also
 *          between two steps of the others), ABORTED, PEER_LOST, INTERRUPTED (the model can no longer be used)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_join(tsr_ddp *ddp, tsr_flag sync_params);

/** Set every gradient to zero; on a device, on the trainer's stream.
 *  @param ddp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (between a ready and its wait)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_zero_grad(tsr_ddp *ddp);

/** Free the DDP object. NULL is ignored. Gradient views become invalid; destroy optimizers created from it first. On a
 *  device this waits until nothing there uses the gradients.
 *  @param ddp  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_ddp_destroy(tsr_ddp *ddp);

#ifdef __cplusplus
}
#endif
#endif
