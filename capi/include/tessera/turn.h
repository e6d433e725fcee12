/* Tessera: turns: one rank works alone, as in an evaluation on rank 0, while the others wait for it. */
#ifndef TESSERA_TURN_H
#define TESSERA_TURN_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Create a turn of one rank. Every rank of the communicator creates it, the rank whose turn it is then works, and all call
 *  tsr_turn_end, where the others wait. Until then the communicator refuses everything else on every rank with
 *  INVALID_STATE, also another turn, and so do the sharded units, pipelines and savers that were made from it; other
 *  communicators are not affected. A rank that waits notices the death of a peer at once, as in any collective.
 *  @param comm        borrowed until destroy
 *  @param rank        the rank whose turn it is
 *  @param timeout_ms  how long the others wait for the end, or for the next report of progress; positive. The timeout of
 *                     the communicator does not apply to them
 *  @param out         the turn
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (also inside another turn of `comm`); the error of a communicator that
 *          has failed
 *  @threadsafety exclusive comm  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_turn_create(tsr_comm *comm, int32_t rank, int32_t timeout_ms, tsr_turn **out);

/** Report progress, on the rank whose turn it is. The others then wait up to the timeout again, log the report every 10 s
 *  (one rank for all, at level INFO), and name the last one if they time out. The call does not wait: a report is left out
 *  while the previous one is on its way, which it is until all others wait.
 *  @param turn   borrowed for the call
 *  @param done   steps that are done
 *  @param total  the number of all steps, or 0 if unknown
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (another rank's turn; it has ended), or what a peer failed with while
 *          it waited: PEER_LOST, ABORTED, TIMEOUT, MISMATCH
 *  @threadsafety exclusive turn and its comm  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_turn_progress(tsr_turn *turn, int64_t done, int64_t total);

/** End the turn: return on all ranks when the rank whose turn it is has called this, and the others are there. That rank
 *  waits for late ones up to the communicator's timeout. Once, also if the work failed.
 *  @param turn     borrowed for the call
 *  @param failure  on the rank whose turn it is: why its work failed, which the others get as USER (the first 487
 *                  bytes), or NULL if it succeeded. Elsewhere ignored
 *  @return TSR_OK, USER (not on the rank that failed), TIMEOUT (names the rank and its last report), PEER_LOST, ABORTED,
 *          MISMATCH, INTERRUPTED, INVALID_ARGUMENT, INVALID_STATE (it has ended already)
 *  @threadsafety exclusive turn and its comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_turn_end(tsr_turn *turn, const char *failure);

/** Free the turn, after which the communicator can be used again. Without an end, the others wait until their timeout.
 *  NULL is ignored.
 *  @param turn  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_turn_destroy(tsr_turn *turn);

#ifdef __cplusplus
}
#endif
#endif
