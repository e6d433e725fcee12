/* Tessera: collectives that are prepared once and launched many times. */
#ifndef TESSERA_PLAN_H
#define TESSERA_PLAN_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What a plan does: each value stands for the function of that name in comm.h. The in-place ones, all_reduce and
 *  broadcast, take their tensors as outputs; barrier takes none. */
enum {
    TSR_COLLECTIVE_BARRIER = 1,
    TSR_COLLECTIVE_ALL_REDUCE = 2,
    TSR_COLLECTIVE_REDUCE_SCATTER = 3, /* one pair of tensors, or several as in tsr_comm_reduce_scatter_coalesced */
    TSR_COLLECTIVE_ALL_GATHER = 4,     /* likewise */
    TSR_COLLECTIVE_ALL_GATHER_V = 5,
    TSR_COLLECTIVE_BROADCAST = 6,
    TSR_COLLECTIVE_REDUCE = 7,
    TSR_COLLECTIVE_GATHER = 8,
    TSR_COLLECTIVE_SCATTER = 9,
    TSR_COLLECTIVE_ALL_TO_ALL = 10
};

/** Prepare a collective and check its arguments once. A launch then needs no check and, between ranks of one host, no
 *  allocation. The ranks still compare what they launch, and a plan may be matched with the ordinary call on another
 *  rank. Local: every rank prepares its own plan.
 *  @param comm        borrowed until destroy
 *  @param collective  a TSR_COLLECTIVE_ value
 *  @param inputs      n_inputs tensors; memory borrowed until destroy, structs for the call
 *  @param n_inputs    0 for the in-place ones
 *  @param outputs     n_outputs tensors; likewise
 *  @param n_outputs   0 if this rank receives nothing
 *  @param op          a TSR_REDUCE_ value for a reduction, otherwise 0
 *  @param root        a rank for broadcast, reduce, gather and scatter, otherwise -1
 *  @param stream      CUDA stream, or NULL on the CPU
 *  @param out         the plan
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, ABORTED, UNSUPPORTED
 *  @threadsafety exclusive comm  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_plan_create(tsr_comm *comm, int32_t collective, const tsr_tensor *inputs,
                                                size_t n_inputs, const tsr_tensor *outputs, size_t n_outputs,
                                                tsr_reduce_op op, int32_t root, void *stream, tsr_plan **out);

/** Launch the collective and return when it is done.
 *  @param plan  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (a previous start is not done; the communicator is destroyed or
 *          finalized), TIMEOUT, ABORTED, PEER_LOST, MISMATCH, INTERRUPTED
 *  @threadsafety exclusive plan and its comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_plan_run(tsr_plan *plan);

/** Launch the collective in the background, in the order of the communicator's calls.
 *  @param plan  borrowed until the launch is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (the previous start is not done; the communicator is destroyed or
 *          finalized), ABORTED
 *  @threadsafety exclusive plan and its comm  @collective yes  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_plan_start(tsr_plan *plan);

/** Wait for the last tsr_plan_start; returns immediately if the plan was never started.
 *  @param plan        borrowed for the call
 *  @param timeout_ms  negative: until the collective's own deadline
 *  @return TSR_OK, NOT_READY (it continues), the collective's error, INTERRUPTED, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_plan_wait(const tsr_plan *plan, int32_t timeout_ms);

/** Free the plan. A launch that is not done continues, and its tensors must live until it is done. NULL is ignored.
 *  @param plan  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_plan_destroy(tsr_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
