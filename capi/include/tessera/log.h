/* Tessera: the log, and interruption of blocking calls. */
#ifndef TESSERA_LOG_H
#define TESSERA_LOG_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TSR_LOG_DEBUG = 1, TSR_LOG_INFO = 2, TSR_LOG_WARNING = 3, TSR_LOG_ERROR = 4, TSR_LOG_OFF = 5 };

/** Receives one line, without a newline. It is called on any thread, and may be called on several at once, so it must
 *  be thread-safe. It must not call the library. */
typedef void (*tsr_log_fn)(int32_t level, const char *line, void *user_data);

/** Drop lines below `level` (default: the environment's TESSERA_LOG=debug|info|warning|error|off, else warning).
 *  @param level  a TSR_LOG_ value
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_log_set_level(int32_t level);

/** Send the log to `fn` instead of standard error; NULL restores standard error.
 *  @param fn         borrowed until replaced
 *  @param user_data  passed to fn
 *  @param destroy    may be NULL; called on user_data once fn is replaced
 *  @return TSR_OK
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_log_set_callback(tsr_log_fn fn, void *user_data, tsr_destroy_fn destroy);

/** Polled at least every 100 ms by a blocking call, on the blocked thread. A non-zero result makes the call return
 *  INTERRUPTED. Inside the callback, calls on the communicator, DDP object or saver whose call is blocked are
 *  INVALID_STATE. */
typedef int32_t (*tsr_interrupt_fn)(void *user_data);

/** Set the interrupt callback of the calling thread; NULL removes it. Bindings use it for Ctrl-C and
 *  thread interruption.
 *  @param fn         borrowed until replaced
 *  @param user_data  borrowed until replaced
 *  @return TSR_OK
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_interrupt_set(tsr_interrupt_fn fn, void *user_data);

#ifdef __cplusplus
}
#endif
#endif
