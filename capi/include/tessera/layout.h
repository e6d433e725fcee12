/* Tessera: how a global tensor is distributed over the ranks. Pure arithmetic; only tsr_layout_gather communicates. */
#ifndef TESSERA_LAYOUT_H
#define TESSERA_LAYOUT_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What one mesh dimension does with a tensor. */
enum { TSR_PLACE_REPLICATE = 1, TSR_PLACE_SHARD = 2 };

typedef struct tsr_placement {
    int32_t kind; /* TSR_PLACE_ */
    int32_t dim;  /* the tensor dimension of SHARD; 0 otherwise */
} tsr_placement;

/** One piece that a rank holds, as a box of the global tensor. Offsets and sizes count elements. */
typedef struct tsr_box {
    int64_t offsets[TSR_MAX_NDIM];
    int64_t sizes[TSR_MAX_NDIM];
} tsr_box;

/** Create a layout from placements. Mesh dimensions are applied in order; SHARD splits like torch.chunk (equal parts of
 *  ceil(size / parts), then a shorter one, then empty ones).
 *  @param shape       ndim sizes, borrowed for the call
 *  @param ndim        0 to 8
 *  @param mesh_sizes  mesh_ndim sizes, row-major ranks, borrowed for the call
 *  @param placements  mesh_ndim placements, borrowed for the call
 *  @param mesh_ndim   1 to 8
 *  @param out         the layout
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_layout_create(const int64_t *shape, int32_t ndim, const int32_t *mesh_sizes,
                                                  const tsr_placement *placements, int32_t mesh_ndim, tsr_layout **out);

/** Create a layout from explicit boxes: `counts[r]` boxes belong to rank r, listed in rank order. Boxes must lie inside
 *  the tensor, and any two must be equal (replicas) or disjoint.
 *  @param shape       ndim sizes, borrowed for the call
 *  @param ndim        0 to 8
 *  @param boxes       borrowed for the call
 *  @param counts      world_size numbers, borrowed for the call
 *  @param world_size  1 to 4096
 *  @param out         the layout
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_layout_from_boxes(const int64_t *shape, int32_t ndim, const tsr_box *boxes,
                                                      const int32_t *counts, int32_t world_size, tsr_layout **out);

/** Create a layout from explicit boxes when each rank knows only its own. The ranks exchange only their tables of
 *  offsets and sizes; all get the layout that tsr_layout_from_boxes would create from all boxes.
 *  @param comm   borrowed for the call
 *  @param shape  ndim sizes of the global tensor, the same on every rank; borrowed for the call
 *  @param ndim   0 to 8
 *  @param boxes  this rank's boxes, in the order of its pieces; NULL if there are none; borrowed for the call
 *  @param count  their number
 *  @param out    the layout, with the communicator's world size
 *  @return TSR_OK, INVALID_ARGUMENT (also: a box outside the tensor, or two boxes that overlap in part), MISMATCH
 *          (shapes differ, or a rank calls another collective), INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST,
 *          INTERRUPTED. An error in one rank's arguments is returned on all ranks and names that rank
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_layout_gather(tsr_comm *comm, const int64_t *shape, int32_t ndim,
                                                  const tsr_box *boxes, int32_t count, tsr_layout **out);

/** The number of boxes that `rank` holds; empty boxes are not counted (a 0-d tensor has one box).
 *  @param layout  borrowed for the call
 *  @param rank    0 to world size - 1
 *  @param count   out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_layout_box_count(const tsr_layout *layout, int32_t rank, int32_t *count);

/** The `index`-th box of `rank`. Entries beyond the tensor's ndim are zero.
 *  @param layout  borrowed for the call
 *  @param rank    0 to world size - 1
 *  @param index   0 to count - 1
 *  @param box     out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_layout_box(const tsr_layout *layout, int32_t rank, int32_t index, tsr_box *box);

/** Free the layout. NULL is ignored.
 *  @param layout  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_layout_destroy(tsr_layout *layout);

#ifdef __cplusplus
}
#endif
#endif
