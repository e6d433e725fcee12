/* Tessera: an n-dimensional named arrangement of ranks. */
#ifndef TESSERA_MESH_H
#define TESSERA_MESH_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Arrange the ranks of `comm`, row-major, and make a communicator per dimension (of the ranks that differ in that
 *  coordinate alone).
 *  @param comm   borrowed for the call
 *  @param names  ndim different names ("dp", "tp"), borrowed for the call
 *  @param sizes  ndim sizes whose product is the world size, borrowed for the call
 *  @param ndim   1 to 8
 *  @param out    the mesh
 *  @return TSR_OK, INVALID_ARGUMENT, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_mesh_create(tsr_comm *comm, const char *const *names, const int32_t *sizes,
                                                int32_t ndim, tsr_mesh **out);

/** The number of dimensions.
 *  @param mesh  borrowed for the call
 *  @param ndim  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_mesh_ndim(const tsr_mesh *mesh, int32_t *ndim);

/** Size of dimension `name` and this rank's coordinate in it.
 *  @param mesh        borrowed for the call
 *  @param name        borrowed for the call
 *  @param size        out, may be NULL
 *  @param coordinate  out, may be NULL
 *  @return TSR_OK, INVALID_ARGUMENT, NOT_FOUND, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_mesh_dim(const tsr_mesh *mesh, const char *name, int32_t *size,
                                             int32_t *coordinate);

/** The communicator of dimension `name`.
 *  @param mesh  borrowed for the call
 *  @param name  borrowed for the call
 *  @param comm  out: borrowed until destroy of the mesh; must not be destroyed
 *  @return TSR_OK, INVALID_ARGUMENT, NOT_FOUND, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_mesh_comm(const tsr_mesh *mesh, const char *name, tsr_comm **comm);

/** Free the mesh and its communicators. NULL is taken.
 *  @param mesh  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_mesh_destroy(tsr_mesh *mesh);

#ifdef __cplusplus
}
#endif
#endif
