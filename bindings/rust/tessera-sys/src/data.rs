//! `tessera/data.h`.

use crate::{tsr_comm, tsr_sampler, tsr_status};

structs! {
    /// `tsr_sampler_options`.
    struct tsr_sampler_options {
        struct_size: usize,
        seed: u64,
        shuffle: i32,
        drop_last: i32,
    }
}

functions! { "data":
    fn tsr_sampler_options_init(options: *mut tsr_sampler_options, struct_size: usize) -> tsr_status;
    fn tsr_sampler_create(
        comm: *const tsr_comm,
        length: i64,
        options: *const tsr_sampler_options,
        out: *mut *mut tsr_sampler,
    ) -> tsr_status;
    fn tsr_sampler_next(sampler: *mut tsr_sampler, indices: *mut i64, size: usize, count: *mut usize) -> tsr_status;
    fn tsr_sampler_position(sampler: *const tsr_sampler, epoch: *mut i64, consumed: *mut i64) -> tsr_status;
    fn tsr_sampler_set_epoch(sampler: *mut tsr_sampler, epoch: i64) -> tsr_status;
    fn tsr_sampler_destroy(sampler: *mut tsr_sampler);
}
