/* Tessera: an n-dimensional named arrangement of ranks. */
#ifndef TESSERA_MESH_H
#define TESSERA_MESH_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Arrange the ranks of `comm` in row-major order and create a communicator per dimension (of the ranks that differ
 *  only in that coordinate). Invalid arguments on one rank are INVALID_ARGUMENT on all ranks, which names that rank;
 *  valid shapes that differ between ranks are MISMATCH. The communicator stays usable.
 *  @param comm   borrowed for the call
 *  @param names  ndim unique names ("dp", "tp"), borrowed for the call
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

/** The communicator of dimension `name`. Slices share it through separate handles; do not use it through two
 *  handles at the same time.
 *  @param mesh  borrowed for the call
 *  @param name  borrowed for the call
 *  @param comm  out: borrowed until destroy of the mesh; must not be destroyed
 *  @return TSR_OK, INVALID_ARGUMENT, NOT_FOUND, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_mesh_comm(const tsr_mesh *mesh, const char *name, tsr_comm **comm);

/** Create a mesh of some of the dimensions, with their communicators.
 *  @param mesh   borrowed for the call
 *  @param names  ndim names of its dimensions, in its order, borrowed for the call
 *  @param ndim   1 to the mesh's ndim
 *  @param out    the slice, which is independent of `mesh`
 *  @return TSR_OK, INVALID_ARGUMENT (another order), NOT_FOUND, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_mesh_slice(const tsr_mesh *mesh, const char *const *names, int32_t ndim,
                                               tsr_mesh **out);

/** Create a mesh with one dimension in place of all dimensions of `mesh`, with a communicator of the ranks that differ
 *  only in their coordinates. For a slice ("dp", "cp"), these are all ranks that work on different data.
 *  @param mesh  borrowed for the call
 *  @param comm  the communicator from which the mesh was created (for a slice: its parent mesh); borrowed for the call
 *  @param name  of the new dimension, borrowed for the call; NULL: the names of the old ones, joined by "_"
 *  @param out   the new mesh, which is independent of `mesh`
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_mesh_flatten(const tsr_mesh *mesh, tsr_comm *comm, const char *name,
                                                 tsr_mesh **out);

/** Free the mesh and its communicators, except those that a slice of it still uses. NULL is ignored.
 *  @param mesh  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_mesh_destroy(tsr_mesh *mesh);

#ifdef __cplusplus
}
#endif
#endif
