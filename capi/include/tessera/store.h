/* Tessera: the key-value store through which the ranks of a job find each other. */
#ifndef TESSERA_STORE_H
#define TESSERA_STORE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of a store. `_init` writes the defaults; afterwards every field is taken literally. Not TLS: TESSERA_TLS. */
typedef struct tsr_store_options {
    size_t struct_size;
    int32_t timeout_ms; /* deadline of the connection, and default deadline of calls; default 60000 */
    tsr_flag insecure;  /* 1: no job token, no handshake; default 0 (1 if TESSERA_INSECURE=1) */
    const char *token;  /* job token, hexadecimal, 64 digits; NULL (default): TESSERA_TOKEN_FD, TESSERA_TOKEN_FILE,
                             TESSERA_TOKEN, else on loopback a 0600 file in the user's runtime directory */
    const char *job_id; /* part of the handshake; NULL (default): TESSERA_JOB_ID or "" */
    uint64_t epoch;     /* part of the handshake: ranks of another epoch are refused; default TESSERA_EPOCH or 0 */
} tsr_store_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_store_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_options_init(tsr_store_options *options, size_t struct_size);

/** Start a store's TCP server on exactly the given address.
 *  @param host     numeric address or name, borrowed for the call
 *  @param port     0: any free port
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the server, which runs on its own thread until destroyed
 *  @return TSR_OK, INVALID_ARGUMENT, IO (address in use), PERMISSION (no token)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_serve(const char *host, uint16_t port, const tsr_store_options *options,
                                                tsr_store_server **out);

/** The port that the server listens on.
 *  @param server  borrowed for the call
 *  @param port    out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_server_port(const tsr_store_server *server, uint16_t *port);

/** Stop the server; connected clients get errors. NULL is ignored.
 *  @param server  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_store_server_destroy(tsr_store_server *server);

/** Connect to a store.
 *  @param uri      "tcp://host:port", or "file:///directory" (an empty or common directory on a shared file system)
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the store
 *  @return TSR_OK, INVALID_ARGUMENT, TIMEOUT (no answer), PERMISSION (token refused), IO, VERSION, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_open(const char *uri, const tsr_store_options *options, tsr_store **out);

/** Disconnect. NULL is ignored. Keys stay.
 *  @param store  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_store_destroy(tsr_store *store);

/** Set `key` to `size` bytes (at most 8 MiB; keys at most 1 KiB).
 *  @param store  borrowed for the call
 *  @param key    UTF-8, borrowed for the call
 *  @param value  borrowed for the call; may be NULL if size is 0
 *  @param size   bytes
 *  @return TSR_OK, INVALID_ARGUMENT, IO, TIMEOUT, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_set(const tsr_store *store, const char *key, const void *value, size_t size);

/** Read the current value of `key`.
 *  @param store     borrowed for the call
 *  @param key       borrowed for the call
 *  @param value     out, `capacity` bytes; may be NULL if capacity is 0
 *  @param capacity  bytes; a longer value is not written at all
 *  @param size      out: the value's size in bytes
 *  @return TSR_OK (compare size with capacity), NOT_FOUND, INVALID_ARGUMENT, IO, TIMEOUT, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_get(const tsr_store *store, const char *key, void *value, size_t capacity,
                                              size_t *size);

/** Wait until `key` exists.
 *  @param store       borrowed for the call
 *  @param key         borrowed for the call
 *  @param timeout_ms  negative: the store's default
 *  @return TSR_OK, TIMEOUT, INVALID_ARGUMENT, IO, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_wait(const tsr_store *store, const char *key, int32_t timeout_ms);

/** Add `delta` to the integer at `key` (0 if absent; stored as decimal text), atomically.
 *  @param store   borrowed for the call
 *  @param key     borrowed for the call
 *  @param delta   any number
 *  @param result  out, may be NULL: the new value
 *  @return TSR_OK, INVALID_ARGUMENT (the value is not an integer), IO, TIMEOUT, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_add(const tsr_store *store, const char *key, int64_t delta, int64_t *result);

/** Set `key` to `desired` if it holds `expected`, atomically. `expected` NULL means that the key must be absent.
 *  @param store          borrowed for the call
 *  @param key            borrowed for the call
 *  @param expected       borrowed for the call; NULL: absent
 *  @param expected_size  bytes
 *  @param desired        borrowed for the call
 *  @param desired_size   bytes
 *  @param swapped        out: 1 if the key was set, 0 if its value is different
 *  @return TSR_OK, INVALID_ARGUMENT, IO, TIMEOUT, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_compare_set(const tsr_store *store, const char *key, const void *expected,
                                                      size_t expected_size, const void *desired, size_t desired_size,
                                                      tsr_flag *swapped);

/** Delete `key`.
 *  @param store    borrowed for the call
 *  @param key      borrowed for the call
 *  @param existed  out, may be NULL: 1 if the key existed, otherwise 0
 *  @return TSR_OK, INVALID_ARGUMENT, IO, TIMEOUT, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_store_delete(const tsr_store *store, const char *key, tsr_flag *existed);

#ifdef __cplusplus
}
#endif
#endif
