//! `tessera/layout.h`.

use crate::{tsr_comm, tsr_layout, tsr_status};

constants! { i32:
    TSR_PLACE_REPLICATE = 1;
    TSR_PLACE_SHARD = 2;
}

structs! {
    /// `tsr_placement`.
    struct tsr_placement {
        kind: i32,
        dim: i32,
    }
    /// `tsr_box`.
    struct tsr_box {
        offsets: [i64; 8],
        sizes: [i64; 8],
    }
}

functions! { "layout":
    fn tsr_layout_create(
        shape: *const i64,
        ndim: i32,
        mesh_sizes: *const i32,
        placements: *const tsr_placement,
        mesh_ndim: i32,
        out: *mut *mut tsr_layout,
    ) -> tsr_status;
    fn tsr_layout_from_boxes(
        shape: *const i64,
        ndim: i32,
        boxes: *const tsr_box,
        counts: *const i32,
        world_size: i32,
        out: *mut *mut tsr_layout,
    ) -> tsr_status;
    fn tsr_layout_gather(
        comm: *mut tsr_comm,
        shape: *const i64,
        ndim: i32,
        boxes: *const tsr_box,
        count: i32,
        out: *mut *mut tsr_layout,
    ) -> tsr_status;
    fn tsr_layout_box_count(layout: *const tsr_layout, rank: i32, count: *mut i32) -> tsr_status;
    fn tsr_layout_box(layout: *const tsr_layout, rank: i32, index: i32, piece: *mut tsr_box) -> tsr_status;
    fn tsr_layout_destroy(layout: *mut tsr_layout);
}
