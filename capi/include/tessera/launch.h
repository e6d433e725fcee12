/* Tessera: the launcher and the ranks. */
#ifndef TESSERA_LAUNCH_H
#define TESSERA_LAUNCH_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Whether the launcher was asked to stop (SIGTERM or Ctrl-C to `tessera run`): if so, save and return soon. It only
 *  reads a flag. The first call tells the launcher that this rank polls; the launcher does not wait for a job in which
 *  no rank polls.
 *  @return 1 or 0; always 0 outside `tessera run`
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API tsr_flag tsr_preempt_requested(void);

/** Tell the launcher why this process fails, for its error summary. It writes the error file that the environment names
 *  (TESSERA_ERROR_FILE, TORCHELASTIC_ERROR_FILE); only the first call of a process has an effect.
 *  @param message    UTF-8, borrowed for the call; its first line is used where there is room for only one. If it
 *                    contains the message of this thread's last error, taken or not, the launcher also learns that
 *                    error's code and peer: the cause of a TIMEOUT is the rank that did not arrive, not the one that
 *                    noticed
 *  @param traceback  UTF-8, may be NULL, borrowed for the call
 *  @return TSR_OK (also outside a launcher), INVALID_ARGUMENT, IO
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_record_error(const char *message, const char *traceback);

/** tsr_record_error for an error that the program detected itself, for example where its ranks meet without the
 *  library.
 *  @param message    UTF-8, borrowed for the call
 *  @param traceback  UTF-8, may be NULL, borrowed for the call
 *  @param code       a TSR_E_ code. For TIMEOUT, PEER_LOST and ABORTED the cause is `peer`, not the reporting rank
 *  @param peer       the rank that the error is about, as in TESSERA_RANK; if several, the first; -1: none or unknown
 *  @return TSR_OK (also outside a launcher), INVALID_ARGUMENT, IO
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_record_error_about(const char *message, const char *traceback, tsr_status code,
                                                       int32_t peer);

#ifdef __cplusplus
}
#endif
#endif
