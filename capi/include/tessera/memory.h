/* Tessera: memory that a communicator's transport accesses without copies. */
#ifndef TESSERA_MEMORY_H
#define TESSERA_MEMORY_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Allocate a buffer on every rank of `comm`. On one host it is shared memory that the peers can access, so collectives
 *  on tensors inside it need no staging. Its content is zero and its start is aligned to 4096 bytes.
 *  @param comm  borrowed for the call; the buffer keeps alive what it needs
 *  @param size  bytes, the same on every rank
 *  @param out   the buffer
 *  @return TSR_OK, INVALID_ARGUMENT, MISMATCH (sizes differ), NO_MEMORY, TIMEOUT, PEER_LOST, ABORTED
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_buffer_create(tsr_comm *comm, size_t size, tsr_buffer **out);

/** The buffer's first byte.
 *  @param buffer  borrowed for the call
 *  @param data    out: borrowed until tsr_buffer_destroy
 *  @param size    out, may be NULL: bytes
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_buffer_data(const tsr_buffer *buffer, void **data, size_t *size);

/** Release this rank's reference to the buffer. NULL is ignored. No collective may be using it.
 *  @param buffer  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_buffer_destroy(tsr_buffer *buffer);

#ifdef __cplusplus
}
#endif
#endif
