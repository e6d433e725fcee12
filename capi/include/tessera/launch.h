/* Tessera: what the launcher tells the ranks. */
#ifndef TESSERA_LAUNCH_H
#define TESSERA_LAUNCH_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Whether the launcher was asked to stop (SIGTERM or Ctrl-C to `tessera run`): save and return soon. Reads a flag, costs
 *  nothing. The first call tells the launcher that this rank listens: a job of which no rank ever called is not waited for.
 *  @return 1 or 0; always 0 outside `tessera run`
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API tsr_flag tsr_preempt_requested(void);

/** Tell the launcher why this process fails, for its error summary. Writes the error file that the environment names
 *  (TESSERA_ERROR_FILE, TORCHELASTIC_ERROR_FILE); the first call of a process counts, later ones do nothing.
 *  @param message    UTF-8, borrowed for the call; its first line stands for it where there is room for one. Where it has the
 *                    message of this thread's last error in it, taken or not, the launcher learns that error's code and
 *                    peer too: of a TIMEOUT the rank that did not come is the cause, not the one that noticed
 *  @param traceback  UTF-8, may be NULL, borrowed for the call
 *  @return TSR_OK (also outside a launcher), INVALID_ARGUMENT, IO
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_record_error(const char *message, const char *traceback);

/** tsr_record_error() of an error that the program found by itself, as where its ranks meet without the library.
 *  @param message    UTF-8, borrowed for the call
 *  @param traceback  UTF-8, may be NULL, borrowed for the call
 *  @param code       a TSR_E_ code. Of a TIMEOUT `peer` is the cause, and of PEER_LOST and ABORTED, not the rank that says so
 *  @param peer       the rank that it is about, by its TESSERA_RANK: with several, the first; -1: none, or not known
 *  @return TSR_OK (also outside a launcher), INVALID_ARGUMENT, IO
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_record_error_about(const char *message, const char *traceback, tsr_status code,
                                                       int32_t peer);

#ifdef __cplusplus
}
#endif
#endif
