/* Tessera: fully sharded data-parallel training. Each rank holds a shard of every parameter, of its gradient and of the
 * optimizer's state. Parameters are unsharded ("whole" in the names below) only while a unit of the model computes, in
 * one copy per host.
 *
 * A step: for each unit tsr_fsdp_forward, compute, tsr_fsdp_forward_done; then, in reverse, tsr_fsdp_backward, write
 * gradients, tsr_fsdp_grads_ready; tsr_fsdp_wait, and the optimizer's step on the shards. All ranks make these calls
 * for the same units in the same order. docs/FSDP.md describes what each option does and costs.
 *
 * Parameters are all on the CPU, or all on the CUDA device of a communicator with the backend "cpu:auto,cuda:nccl". On a
 * device, shards, unsharded parameters and gradients are there too, one copy per rank, and everything goes in the order of
 * one stream of the trainer (tsr_fsdp_set_stream): it computes and updates shards on that stream. Where a call below
 * "returns when" or "waits", on a device it makes the stream wait, not the caller, who waits for the other ranks' callers
 * alone. Memory of the host is never read or written there. */
#ifndef TESSERA_FSDP_H
#define TESSERA_FSDP_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Parameters that are unsharded together, such as a layer. `reserved` must be zero. The size of this struct is
 *  frozen. */
typedef struct tsr_fsdp_unit {
    const char *name; /* unique in the model */
    /* n contiguous tensors of one dimension or more (any number in a flat unit), sharded by rows. Floating-point; those
     * without a gradient may have any dtype, which they keep when unsharded. data may be NULL: the shards are then
     * zero, to be written through tsr_fsdp_shard or by a load. On a device they are read in the order of its default
     * stream */
    const tsr_param *params;
    size_t n;                /* at least 1 */
    const tsr_flag *trained; /* n flags, 0: without a gradient; NULL: all are trained */
    /* 1 (default): sharded between forward and backward; 0: stays unsharded; n: kept by every n consecutive ranks,
     * where n divides the number of ranks that shard the unit: the full unit on each host if n ranks fit on one,
     * otherwise a part on each; like 1 if hosts have different numbers of ranks */
    int32_t reshard_after_forward;
    tsr_dtype param_dtype;  /* 0 (default): from the options */
    tsr_dtype reduce_dtype; /* 0 (default): from the options */
    /* parameters are split only between blocks of this many rows; 0 (default): between any rows, like torch.chunk */
    int32_t row_block;
    /* 1: the parameters of one dtype are sharded together, as one row of elements that may be split anywhere: all ranks
     * hold equal parts, and shards have one dimension; 0 (default): each parameter separately, by rows */
    tsr_flag flat;
    int32_t reserved;
} tsr_fsdp_unit;

/** Write the defaults into `unit`: sharded between forward and backward, dtypes from the options, no parameters.
 *  @param unit         out
 *  @param struct_size  sizeof(tsr_fsdp_unit)
 *  @return TSR_OK, INVALID_ARGUMENT (struct_size is different)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unit_init(tsr_fsdp_unit *unit, size_t struct_size);

/** Options of FSDP, the same on every rank. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_fsdp_options {
    size_t struct_size;
    /* parameters are sharded over groups of this many consecutive ranks, and each group holds a replica; must divide
     * the world size; 0 (default): over all ranks */
    int32_t shard_ranks;
    /* how many units are prefetched while one computes, in the order of the previous forward; default 1 */
    int32_t forward_prefetch;
    int32_t backward_prefetch; /* the same in backward, in the reverse order of this forward; default 1 */
    /* a backward waits for gradient memory while the gradients of this many units are being reduced; at least 1, with
     * which units take turns; default 2 */
    int32_t grads_in_flight;
    /* the floating-point type of unsharded parameters; 0 (default): the registered dtype. Shards keep the registered
     * dtype */
    tsr_dtype param_dtype;
    /* the floating-point type in which unsharded gradients are held and reduced; 0 (default): that of unsharded
     * parameters */
    tsr_dtype reduce_dtype;
    tsr_reduce_op op; /* how the ranks' gradients are reduced: TSR_REDUCE_AVG (default) or TSR_REDUCE_SUM */
    /* each rank divides its gradients by this before they are summed; the remaining factor of the average (or sum) is
     * applied afterwards, which keeps f16 sums in range; default 1 */
    double pre_divide;
    tsr_flag sync_values; /* 1 (default): shards begin with rank 0's values; 0: with each rank's own values */
    /* NULL (default), or the tensor-parallel model whose slices the parameters are, by name: `comm` has the ranks with
     * the same slices, such as a mesh's "dp". Layouts, optimizers, norms and states are then those of the whole model,
     * and tsr_tp_sum_grads is not needed. Borrowed until destroy */
    tsr_tp *tp;
} tsr_fsdp_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_fsdp_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_options_init(tsr_fsdp_options *options, size_t struct_size);

/** Register a model, check that all ranks registered the same one, and shard it. Parameters are numbered in order, over
 *  all units. A leading "module." or "_orig_mod." of a name is stripped.
 *  @param comm     borrowed until destroy; the model splits off two communicators
 *  @param units    borrowed for the call, including the parameters' memory
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the FSDP object
 *  @return TSR_OK, INVALID_ARGUMENT, UNSUPPORTED, MISMATCH (names the first difference), TIMEOUT, ABORTED, PEER_LOST,
 *          NO_MEMORY
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_create(tsr_comm *comm, const tsr_fsdp_unit *units, size_t n,
                                                const tsr_fsdp_options *options, tsr_fsdp **out);

/** The number of units.
 *  @param fsdp   borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unit_count(const tsr_fsdp *fsdp, size_t *count);

/** The number of parameters, over all units.
 *  @param fsdp   borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_param_count(const tsr_fsdp *fsdp, size_t *count);

/** The name of a unit.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @param name  out: borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unit_name(const tsr_fsdp *fsdp, size_t unit, const char **name);

/** A parameter as registered.
 *  @param fsdp     borrowed for the call
 *  @param index    0 to parameter count - 1
 *  @param param    out, may be NULL: name, unsharded shape and dtype, borrowed until destroy; data is NULL
 *  @param unit     out, may be NULL: the index of its unit
 *  @param trained  out, may be NULL: 1 if it has a gradient, otherwise 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_param(const tsr_fsdp *fsdp, size_t index, tsr_param *param, size_t *unit,
                                               tsr_flag *trained);

/** The phase of a unit in its step. A program may write the unit's shards while it is SHARDED or REDUCING; optimizers
 *  and loads require all units to be SHARDED. */
enum {
    TSR_FSDP_SHARDED = 0,
    TSR_FSDP_ON_ITS_WAY = 1, /* being unsharded */
    TSR_FSDP_WHOLE = 2,      /* unsharded */
    TSR_FSDP_BACKWARD = 3,   /* unsharded, and its gradients are being written */
    TSR_FSDP_REDUCING = 4    /* sharded; its gradients are being reduced until tsr_fsdp_wait */
};

/** The phase of a unit in its step.
 *  @param fsdp   borrowed for the call
 *  @param unit   0 to unit count - 1
 *  @param phase  out: a TSR_FSDP_ value
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unit_phase(const tsr_fsdp *fsdp, size_t unit, int32_t *phase);

/** This rank's rows of a parameter (elements, in a flat unit); it may have none. This is what the optimizer updates and
 *  a checkpoint holds. Do not write it while the unit is unsharded or being unsharded.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param shard  out: name, shape and memory borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_shard(const tsr_fsdp *fsdp, size_t index, tsr_param *shard);

/** The gradient of this rank's rows; it is reduced when tsr_fsdp_wait returns.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param grad   out: shape and memory borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (the parameter is not trained)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_shard_grad(const tsr_fsdp *fsdp, size_t index, tsr_tensor *grad);

/** The layout of a parameter: which rank holds which part.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param out    the layout, to be destroyed by the caller
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_layout(const tsr_fsdp *fsdp, size_t index, tsr_layout **out);

/** The unsharded parameter, read-only because the ranks of a host share one copy. Wait for anything that reads it in
 *  the background, such as a collective with `work`, before the unit is sharded again: the library does not track such
 *  readers, and they would read another unit's parameters.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param whole  out: shape borrowed until destroy; memory, aligned to 64 bytes, until the unit is sharded again, at
 *                the same address whenever it is unsharded
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (its unit is not unsharded)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_whole(tsr_fsdp *fsdp, size_t index, tsr_tensor *whole);

/** The memory for the unsharded gradient of a parameter, to be written between tsr_fsdp_backward and
 *  tsr_fsdp_grads_ready of its unit. Its initial content is undefined and may be NaN, except where gradients accumulate
 *  without synchronisation (tsr_fsdp_set_sync).
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param grad   out: shape borrowed until destroy, memory until tsr_fsdp_grads_ready
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_grad(tsr_fsdp *fsdp, size_t index, tsr_tensor *grad);

/** Begin a unit's forward: returns when its parameters are unsharded, while the next units are being prefetched.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a backward pass), MISMATCH (another rank unshards another
 *          unit), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY, INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_forward(tsr_fsdp *fsdp, size_t unit);

/** End a unit's forward: its parameters are sharded again, unless it is kept until its backward. A unit that is still
 *  being unsharded is waited for; other readers are not (see tsr_fsdp_whole).
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY, INTERRUPTED (call
 *          again)
 *  @threadsafety exclusive  @collective yes  @blocking only a unit on its way  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_forward_done(tsr_fsdp *fsdp, size_t unit);

/** Begin a unit's backward: returns when its parameters are unsharded and there is memory for its gradients. A unit
 *  that a step uses more than once, such as a layer that occurs twice, has one backward after all uses or one for each;
 *  their gradients are summed.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY, INTERRUPTED (call
 *          again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_backward(tsr_fsdp *fsdp, size_t unit);

/** Mark a parameter as having no gradient on this rank in this backward, which counts as zeros (see tsr_fsdp_used).
 *  Call it before tsr_fsdp_grads_ready of its unit. Where gradients accumulate without synchronisation
 *  (tsr_fsdp_set_sync) there is nothing to add, and the gradient stays unchanged.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unused(tsr_fsdp *fsdp, size_t index);

/** Whether any rank had a gradient of a parameter in the last reduced step. If no rank had one (with
 *  tsr_fsdp_set_accumulate: since gradients were last set to zero), the shards' gradients are zeros, and optimizers
 *  leave the parameter, its moments and its step count unchanged.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param used   out: 1 or 0; 0 before the first step and for a parameter that is not trained
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_used(const tsr_fsdp *fsdp, size_t index, tsr_flag *used);

/** End a unit's backward: its gradients, which must all be written, are reduced into the shards in the background, and
 *  its parameters are sharded again.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (its backward did not begin, or gradients, which the message names,
 *          were not written: write them and call it again), ABORTED
 *  @threadsafety exclusive  @collective yes  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_grads_ready(tsr_fsdp *fsdp, size_t unit);

/** End of backward: returns when the gradients of all shards are the average (or sum) over the ranks and every unit is
 *  sharded.
 *  @param fsdp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (names the units whose gradients were never marked ready; complete the step and wait
 *          again), MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED (wait again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_wait(tsr_fsdp *fsdp);

/** Abandon the current step at any point, for example after an exception in the trainer: every unit is sharded, and
 *  every gradient is zero, including accumulated ones. All ranks call it after the same calls of that step.
 *  @param fsdp  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in a callback of another call), MISMATCH, TIMEOUT, ABORTED,
 *          PEER_LOST, NO_MEMORY, INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_abandon(tsr_fsdp *fsdp);

/** Begin to unshard a unit in the background. No-op if it is unsharded or being unsharded.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, ABORTED
 *  @threadsafety exclusive  @collective yes  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unshard(tsr_fsdp *fsdp, size_t unit);

/** Wait until a unit that is being unsharded is unsharded.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (the unit is not being unsharded), MISMATCH, TIMEOUT, ABORTED,
 *          PEER_LOST, NO_MEMORY, INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_await(tsr_fsdp *fsdp, size_t unit);

/** Free the memory of an unsharded unit. No-op if it is sharded. Its addresses may hold other parameters afterwards. A
 *  unit that is still being unsharded is waited for; other readers are not (see tsr_fsdp_whole).
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (its backward began), MISMATCH, TIMEOUT, ABORTED, PEER_LOST,
 *          NO_MEMORY, INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking only a unit on its way  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_reshard(tsr_fsdp *fsdp, size_t unit);

/** Name the stream of the trainer, which continues after what the previous one had. What the trainer does with shards,
 *  unsharded parameters and gradients, it does on this stream.
 *  @param fsdp    borrowed for the call
 *  @param stream  of the parameters' device (cudaStream_t), borrowed until another is set or destroy; NULL, as created:
 *                 the device's default stream
 *  @return TSR_OK, INVALID_ARGUMENT (of another device, or not NULL and the parameters are on the CPU), INVALID_STATE (a
 *          unit is not sharded, or its gradients are being reduced), ABORTED, CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_stream(tsr_fsdp *fsdp, void *stream);

/** Set whether the following backward passes reduce gradients. Without synchronisation, gradients stay unsharded on
 *  each rank, and use memory, until the next backward pass with synchronisation reduces their sum: they are initially
 *  zero, and the trainer adds to them.
 *  @param fsdp  borrowed for the call
 *  @param sync  1 (as created) or 0; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a backward pass)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_sync(tsr_fsdp *fsdp, tsr_flag sync);

/** Set whether the following backward passes add to the gradients of the shards instead of replacing them.
 *  @param fsdp        borrowed for the call
 *  @param accumulate  0 (as created) or 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a backward pass)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_accumulate(tsr_fsdp *fsdp, tsr_flag accumulate);

/** Set whether the following backward passes also reduce over replicas (shard_ranks). If not, the sums over the ranks
 *  of each replica, which may be all ranks, are accumulated until the next backward pass that does; the shards'
 *  gradients stay unchanged.
 *  @param fsdp        borrowed for the call
 *  @param all_reduce  1 (as created) or 0; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a backward pass)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_all_reduce(tsr_fsdp *fsdp, tsr_flag all_reduce);

/** Set whether the memory of a unit is freed after its following backward passes. If not, the unit is still SHARDED but
 *  keeps its memory, and the next forward uses its content unless a shard has changed on some rank since: each rank
 *  compares its own. Nothing is then sent between hosts, which speeds up steps that accumulate gradients.
 *  tsr_fsdp_reshard and tsr_fsdp_abandon also free the memory.
 *  @param fsdp     borrowed for the call
 *  @param unit     0 to unit count - 1
 *  @param reshard  1 (as created) or 0; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a backward pass)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_reshard_after_backward(tsr_fsdp *fsdp, size_t unit, tsr_flag reshard);

/** Set the gradients of the shards to zero and discard unsharded accumulated gradients.
 *  @param fsdp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (a unit is not sharded, or its gradients are being reduced), ABORTED
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_zero_grad(tsr_fsdp *fsdp);

/** Free the FSDP object. NULL is ignored. Views become invalid; optimizers created from it keep the shards.
 *  @param fsdp  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_fsdp_destroy(tsr_fsdp *fsdp);

#ifdef __cplusplus
}
#endif
#endif
