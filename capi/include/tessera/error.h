/* Tessera: status codes and error objects. Handles are in types.h. */
#ifndef TESSERA_ERROR_H
#define TESSERA_ERROR_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Status codes. Numbers are never reused. */
enum {
    TSR_OK = 0,
    TSR_E_INVALID_ARGUMENT = 1, /* a value that the call does not accept */
    TSR_E_INVALID_STATE = 2,    /* a valid call at the wrong time; also a destroyed handle, or a forked child's copy */
    TSR_E_TIMEOUT = 3,          /* a deadline passed; the message names what was waited for */
    TSR_E_ABORTED = 4,          /* the communicator failed earlier; see tsr_error_cause */
    TSR_E_PEER_LOST = 5,        /* a rank died; see tsr_error_peer */
    TSR_E_MISMATCH = 6,         /* the ranks' calls or arguments differ */
    TSR_E_IO = 7,               /* an operating system call failed; the native code is errno */
    TSR_E_CORRUPT = 8,          /* data does not match its checksum or format */
    TSR_E_NOT_FOUND = 9,
    TSR_E_NOT_READY = 10,      /* a wait expired; the work continues */
    TSR_E_INTERRUPTED = 11,    /* the interrupt callback asked to return */
    TSR_E_COMMIT_UNKNOWN = 12, /* a rank was lost after the votes; whether the manifest exists decides */
    TSR_E_NO_MEMORY = 13,
    TSR_E_UNSUPPORTED = 14,
    TSR_E_VERSION = 15,    /* the version of a library, binding or format does not match */
    TSR_E_PERMISSION = 16, /* wrong or missing job token, or access denied */
    TSR_E_CUDA = 17,
    TSR_E_NCCL = 18,
    TSR_E_USER = 19,    /* a callback returned non-zero; the native code is its value */
    TSR_E_INTERNAL = 20 /* a bug in Tessera */
};

/** Where a native code comes from. */
enum { TSR_NATIVE_NONE = 0, TSR_NATIVE_ERRNO = 1, TSR_NATIVE_CUDA = 2, TSR_NATIVE_NCCL = 3, TSR_NATIVE_USER = 4 };

/** The name of a status without its prefix, such as "TIMEOUT"; "UNKNOWN" if the number is not a status.
 *  @param status  any number
 *  @return a static string, never NULL
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API const char *tsr_status_name(tsr_status status);

/** The error of the calling thread's last failed call; NULL if no call has failed yet.
 *  @return borrowed until the next failing call of this thread
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API const tsr_error *tsr_error_last(void);

/** Detach the calling thread's last error, so that it can be kept and passed to another thread.
 *  @param out  the error, to be freed by tsr_error_destroy; NULL if there is none
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_error_take(tsr_error **out);

/** Free a detached error. NULL is ignored. Do not pass a borrowed error.
 *  @param error  transferred
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_error_destroy(tsr_error *error);

/** The status code of an error; TSR_OK for NULL.
 *  @param error  borrowed for the call
 *  @return a TSR_E_ code
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API tsr_status tsr_error_code(const tsr_error *error);

/** The error message: what failed, with which value, on which rank, and what to try. UTF-8; "" for NULL.
 *  @param error  borrowed for the call
 *  @return borrowed as long as the error lives
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API const char *tsr_error_message(const tsr_error *error);

/** The error that caused this one, or NULL.
 *  @param error  borrowed for the call
 *  @return borrowed as long as `error` lives
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API const tsr_error *tsr_error_cause(const tsr_error *error);

/** The rank on which the error occurred, or -1.
 *  @param error  borrowed for the call
 *  @return a rank of the communicator concerned, or -1
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API int32_t tsr_error_rank(const tsr_error *error);

/** The rank that the error is about (the one that died, is late or differs), or -1.
 *  @param error  borrowed for the call
 *  @return a rank of the communicator concerned, or -1
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API int32_t tsr_error_peer(const tsr_error *error);

/** The operation that failed ("all_reduce", "save"), or "".
 *  @param error  borrowed for the call
 *  @return borrowed as long as the error lives
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API const char *tsr_error_operation(const tsr_error *error);

/** The sequence number of the collective that failed, or -1.
 *  @param error  borrowed for the call
 *  @return counted from 1 per communicator; sends and receives are counted separately
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API int64_t tsr_error_sequence(const tsr_error *error);

/** The underlying code (errno, a CUDA or NCCL result, a callback's return value), or 0.
 *  @param error   borrowed for the call
 *  @param domain  out, may be NULL: a TSR_NATIVE_ value
 *  @return the native code
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API int32_t tsr_error_native(const tsr_error *error, int32_t *domain);

/** Whether the same call may succeed if it is retried without rebuilding anything (1) or not (0).
 *  @param error  borrowed for the call
 *  @return 1 or 0
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API tsr_flag tsr_error_retriable(const tsr_error *error);

#ifdef __cplusplus
}
#endif
#endif
