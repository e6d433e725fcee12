/* Tessera: fully sharded data-parallel training. Each rank holds a shard of every parameter, of its gradient and of the
 * optimizer's state; parameters are whole only while a unit of the model computes, in one copy a host.
 *
 * A step: for each unit tsr_fsdp_forward, compute, tsr_fsdp_forward_done; then, in reverse, tsr_fsdp_backward, write
 * gradients, tsr_fsdp_grads_ready; tsr_fsdp_wait, and the optimizer's step on the shards. All ranks make these calls for the
 * same units in the same order. docs/FSDP.md tells what each option does and costs. */
#ifndef TESSERA_FSDP_H
#define TESSERA_FSDP_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Parameters that are whole at the same time: a layer, say. `reserved` must be zero. The size of this struct is frozen. */
typedef struct tsr_fsdp_unit {
    const char *name; /* no other unit's */
    const tsr_param
        *params; /* n contiguous tensors of one dimension or more (any number, where the unit is flat), cut by rows;
                                floating-point ones, but those without a gradient may be of any dtype, which they keep
                                when whole; data may be NULL: the shards are zero then, to be written through
                                tsr_fsdp_shard or by a load */
    size_t n;    /* at least 1 */
    const tsr_flag *trained; /* n flags, 0: without a gradient; NULL: all are trained */
    int32_t
        reshard_after_forward; /* 1 (default): sharded between forward and backward; 0: stays whole; n: kept among each n ranks
                                      that follow each other, of which the ranks it is cut among are a multiple: whole on
                                      each host if they fit on one, else a part on each; where hosts have different
                                      numbers of ranks, as 1 */
    tsr_dtype param_dtype;  /* 0 (default): as the options' */
    tsr_dtype reduce_dtype; /* 0 (default): as the options' */
    int32_t row_block;      /* parameters are cut between blocks of so many rows; 0 (default): between any rows, as
 torch.chunk does */
    tsr_flag flat; /* 1: the parameters of one dtype are cut together, as one row of elements, anywhere: ranks have
                          equally much, shards have one dimension; 0 (default): each for itself, by rows */
    int32_t reserved;
} tsr_fsdp_unit;

/** Write the defaults into `unit`: sharded between forward and backward, as the options say, without parameters.
 *  @param unit         out
 *  @param struct_size  sizeof(tsr_fsdp_unit)
 *  @return TSR_OK, INVALID_ARGUMENT (struct_size is another)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unit_init(tsr_fsdp_unit *unit, size_t struct_size);

/** Options of FSDP, the same on every rank. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_fsdp_options {
    size_t struct_size;
    int32_t shard_ranks; /* parameters are cut among so many ranks that follow each other, of which the number of all
                                  ranks is a multiple; each such group holds a replica; 0 (default): among all */
    int32_t forward_prefetch; /* how many units are on their way while one computes, in the order of the forward before;
                                  default 1 */
    int32_t backward_prefetch; /* the same in backward, in the reverse order of this forward; default 1 */
    int32_t grads_in_flight;   /* a backward waits for memory for its whole gradients while those of so many units are
                                  being reduced; at least 1, with which units take turns; default 2 */
    tsr_dtype param_dtype;     /* the floating-point type of whole parameters; 0 (default): as they were registered.
                                  Shards keep that */
    tsr_dtype
        reduce_dtype; /* the floating-point type of whole gradients, in which they are reduced; 0 (default): as whole parameters */
    tsr_reduce_op op;     /* what becomes of the ranks' gradients: TSR_REDUCE_AVG (default) or TSR_REDUCE_SUM */
    double pre_divide;    /* each rank divides its gradients by this before they are summed, and what is left of the
                                  average (or sum) is made up for afterwards: sums of f16 stay in range; default 1 */
    tsr_flag sync_values; /* 1 (default): shards begin with the values of rank 0; 0: with each rank's own */
} tsr_fsdp_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_fsdp_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_options_init(tsr_fsdp_options *options, size_t struct_size);

/** Register a model, check that all ranks registered the same, and cut it. Parameters are numbered as they come, over all
 *  units. A leading "module." or "_orig_mod." of a name is stripped.
 *  @param comm     borrowed until destroy; the model splits two communicators off
 *  @param units    all of it borrowed for the call, the parameters' memory too
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

/** What was registered as a parameter.
 *  @param fsdp     borrowed for the call
 *  @param index    0 to parameter count - 1
 *  @param param    out, may be NULL: name, whole shape and dtype, borrowed until destroy; data is NULL
 *  @param unit     out, may be NULL: the number of its unit
 *  @param trained  out, may be NULL: 1 if it has a gradient, else 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_param(const tsr_fsdp *fsdp, size_t index, tsr_param *param, size_t *unit,
                                               tsr_flag *trained);

/** Where a unit is in its step. A program may write its shards while it is SHARDED or REDUCING; an optimizer and a load do so
 *  while all units are SHARDED. */
enum {
    TSR_FSDP_SHARDED = 0,
    TSR_FSDP_ON_ITS_WAY = 1, /* to be whole */
    TSR_FSDP_WHOLE = 2,
    TSR_FSDP_BACKWARD = 3, /* whole, and its gradients are being written */
    TSR_FSDP_REDUCING = 4  /* sharded; until tsr_fsdp_wait its gradients are reduced */
};

/** Where a unit is in its step.
 *  @param fsdp   borrowed for the call
 *  @param unit   0 to unit count - 1
 *  @param phase  out: TSR_FSDP_
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unit_phase(const tsr_fsdp *fsdp, size_t unit, int32_t *phase);

/** This rank's rows of a parameter (elements, in a flat unit), which may be none: what the optimizer updates and a checkpoint holds. Not to be written
 *  while the unit is whole or on its way.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param shard  out: name, shape and memory borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_shard(const tsr_fsdp *fsdp, size_t index, tsr_param *shard);

/** The gradient of this rank's rows: reduced by the time that tsr_fsdp_wait returns.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param grad   out: shape and memory borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (the parameter is not trained)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_shard_grad(const tsr_fsdp *fsdp, size_t index, tsr_tensor *grad);

/** Who holds which part of a parameter.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param out    the layout, to be destroyed by the caller
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_layout(const tsr_fsdp *fsdp, size_t index, tsr_layout **out);

/** A parameter, whole: read only, since the ranks of a host have one copy of it. What reads it in the background, such as a
 *  collective with `work`, must have been waited for before the unit is sharded again: the library does not know of it, and
 *  it would read another unit's parameters.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param whole  out: shape borrowed until destroy; memory, 64-aligned, until the unit is sharded again, at the same address
 *                whenever it is whole
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (its unit is not whole)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_whole(tsr_fsdp *fsdp, size_t index, tsr_tensor *whole);

/** Where the whole gradient of a parameter is to be written, between tsr_fsdp_backward and tsr_fsdp_grads_ready of its
 *  unit. It holds anything, NaN among it, except where gradients add up (tsr_fsdp_set_sync).
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param grad   out: shape borrowed until destroy, memory until tsr_fsdp_grads_ready
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_grad(tsr_fsdp *fsdp, size_t index, tsr_tensor *grad);

/** A unit's forward begins: returns when its parameters are whole, with the next units on their way.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a backward), MISMATCH (another rank makes another unit
 *          whole), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY, INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_forward(tsr_fsdp *fsdp, size_t unit);

/** A unit's forward ends: its parameters are sharded again, unless it is kept until its backward. One that is still on
 *  its way is waited for; what else reads them is not (see tsr_fsdp_whole).
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY, INTERRUPTED (call
 *          again)
 *  @threadsafety exclusive  @collective yes  @blocking only a unit on its way  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_forward_done(tsr_fsdp *fsdp, size_t unit);

/** A unit's backward begins: returns when its parameters are whole and there is memory for its gradients. A unit that a step
 *  uses more than once, as a layer that comes twice, has one backward after its uses or one for each; the gradients of all are
 *  added up.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY, INTERRUPTED (call
 *          again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_backward(tsr_fsdp *fsdp, size_t unit);

/** This rank has no gradient of a parameter in this backward, which counts as zeros (see tsr_fsdp_used); before
 *  tsr_fsdp_grads_ready of its unit. Where gradients add up (tsr_fsdp_set_sync) there is nothing to add then, and nothing
 *  is done.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unused(tsr_fsdp *fsdp, size_t index);

/** Whether any rank had a gradient of a parameter in the last step that was reduced. Of one that no rank had, since gradients
 *  were set to zero if they add up (tsr_fsdp_set_accumulate), the shards' gradients are zeros, and optimizers leave it, its
 *  moments and its count of steps as they are.
 *  @param fsdp   borrowed for the call
 *  @param index  0 to parameter count - 1
 *  @param used   out: 1 or 0; 0 before the first step and of a parameter that is not trained
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_used(const tsr_fsdp *fsdp, size_t index, tsr_flag *used);

/** A unit's backward ends: its gradients, all written, are reduced into the shards in the background, and its parameters
 *  are sharded again.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (its backward did not begin, or gradients that are named were not
 *          written: it may be completed and said again), ABORTED
 *  @threadsafety exclusive  @collective yes  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_grads_ready(tsr_fsdp *fsdp, size_t unit);

/** The end of backward: returns when the gradients of all shards are the average (or sum) over the ranks, and every unit is
 *  sharded.
 *  @param fsdp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (names the units whose gradients were never said to be ready; the step may be completed
 *          and waited for again), MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED (wait again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_wait(tsr_fsdp *fsdp);

/** Give up the step that has begun, however far it is, such as after an exception of the trainer: every unit is sharded and
 *  every gradient zero, also what was accumulated. All ranks do so after the same calls of that step.
 *  @param fsdp  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in a callback of another call), MISMATCH, TIMEOUT, ABORTED, PEER_LOST,
 *          NO_MEMORY, INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_abandon(tsr_fsdp *fsdp);

/** Begin to make a unit whole, in the background; of one that is whole or on its way, nothing.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, ABORTED
 *  @threadsafety exclusive  @collective yes  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_unshard(tsr_fsdp *fsdp, size_t unit);

/** Returns when a unit on its way is whole.
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (nobody asked for it), MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY,
 *          INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_await(tsr_fsdp *fsdp, size_t unit);

/** Give the memory of a whole unit back; of one that is sharded, nothing. Its addresses show other parameters from here on.
 *  One that is still on its way is waited for; what else reads them is not (see tsr_fsdp_whole).
 *  @param fsdp  borrowed for the call
 *  @param unit  0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (its backward began), MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY,
 *          INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking only a unit on its way  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_reshard(tsr_fsdp *fsdp, size_t unit);

/** Whether the following backwards reduce. Without, gradients stay whole on each rank and take memory until the next backward
 *  with synchronisation reduces their sum: they are zero at first, and the trainer adds to what is there.
 *  @param fsdp  borrowed for the call
 *  @param sync  1 (as created) or 0; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a backward)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_sync(tsr_fsdp *fsdp, tsr_flag sync);

/** Whether the following backwards add to the gradients of the shards instead of replacing them.
 *  @param fsdp        borrowed for the call
 *  @param accumulate  0 (as created) or 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a backward)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_accumulate(tsr_fsdp *fsdp, tsr_flag accumulate);

/** Whether the following backwards reduce over replicas (shard_ranks), too. Without, the sums over the ranks of each replica,
 *  which may be all ranks, are kept, and added up, until the next backward with it; the shards' gradients stay as they are.
 *  @param fsdp        borrowed for the call
 *  @param all_reduce  1 (as created) or 0; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a backward)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_all_reduce(tsr_fsdp *fsdp, tsr_flag all_reduce);

/** Whether the memory of a unit is free after its following backwards. Without, the unit is SHARDED all the same, but its memory
 *  stays its own, and the forward that comes next uses what lies there, unless a shard was changed on some rank since: each
 *  rank compares its own. Between hosts nothing is sent then, which steps that add up gradients gain by. The memory is free
 *  after tsr_fsdp_reshard and tsr_fsdp_abandon, too.
 *  @param fsdp     borrowed for the call
 *  @param unit     0 to unit count - 1
 *  @param reshard  1 (as created) or 0; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (in the middle of a backward)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_set_reshard_after_backward(tsr_fsdp *fsdp, size_t unit, tsr_flag reshard);

/** Set the gradients of the shards to zero, and forget those that add up whole.
 *  @param fsdp  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (a unit is not sharded, or its gradients are being reduced), ABORTED
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_zero_grad(tsr_fsdp *fsdp);

/** Free the FSDP object. NULL is taken. Views end here; optimizers made from it keep the shards.
 *  @param fsdp  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_fsdp_destroy(tsr_fsdp *fsdp);

#ifdef __cplusplus
}
#endif
#endif
