//! `tessera/fsdp.h`.

use std::ffi::c_char;

use crate::{tsr_comm, tsr_fsdp, tsr_layout, tsr_param, tsr_status, tsr_tensor};

structs! {
    /// `tsr_fsdp_unit`. Its size is frozen.
    struct tsr_fsdp_unit {
        name: *const c_char,
        params: *const tsr_param,
        n: usize,
        trained: *const i32,
        reshard_after_forward: i32,
        param_dtype: i32,
        reduce_dtype: i32,
        row_block: i32,
        flat: i32,
        reserved: i32,
    }
    /// `tsr_fsdp_options`.
    struct tsr_fsdp_options {
        struct_size: usize,
        shard_ranks: i32,
        forward_prefetch: i32,
        backward_prefetch: i32,
        grads_in_flight: i32,
        param_dtype: i32,
        reduce_dtype: i32,
        op: i32,
        pre_divide: f64,
        sync_values: i32,
    }
}

constants! { i32:
    TSR_FSDP_SHARDED = 0;
    TSR_FSDP_ON_ITS_WAY = 1;
    TSR_FSDP_WHOLE = 2;
    TSR_FSDP_BACKWARD = 3;
    TSR_FSDP_REDUCING = 4;
}

functions! { "fsdp":
    fn tsr_fsdp_options_init(options: *mut tsr_fsdp_options, struct_size: usize) -> tsr_status;
    fn tsr_fsdp_create(
        comm: *mut tsr_comm,
        units: *const tsr_fsdp_unit,
        n: usize,
        options: *const tsr_fsdp_options,
        out: *mut *mut tsr_fsdp,
    ) -> tsr_status;
    fn tsr_fsdp_unit_count(fsdp: *const tsr_fsdp, count: *mut usize) -> tsr_status;
    fn tsr_fsdp_param_count(fsdp: *const tsr_fsdp, count: *mut usize) -> tsr_status;
    fn tsr_fsdp_unit_name(fsdp: *const tsr_fsdp, unit: usize, name: *mut *const c_char) -> tsr_status;
    fn tsr_fsdp_param(
        fsdp: *const tsr_fsdp,
        index: usize,
        param: *mut tsr_param,
        unit: *mut usize,
        trained: *mut i32,
    ) -> tsr_status;
    fn tsr_fsdp_unit_phase(fsdp: *const tsr_fsdp, unit: usize, phase: *mut i32) -> tsr_status;
    fn tsr_fsdp_shard(fsdp: *const tsr_fsdp, index: usize, shard: *mut tsr_param) -> tsr_status;
    fn tsr_fsdp_shard_grad(fsdp: *const tsr_fsdp, index: usize, grad: *mut tsr_tensor) -> tsr_status;
    fn tsr_fsdp_layout(fsdp: *const tsr_fsdp, index: usize, out: *mut *mut tsr_layout) -> tsr_status;
    fn tsr_fsdp_whole(fsdp: *mut tsr_fsdp, index: usize, whole: *mut tsr_tensor) -> tsr_status;
    fn tsr_fsdp_grad(fsdp: *mut tsr_fsdp, index: usize, grad: *mut tsr_tensor) -> tsr_status;
    fn tsr_fsdp_forward(fsdp: *mut tsr_fsdp, unit: usize) -> tsr_status;
    fn tsr_fsdp_forward_done(fsdp: *mut tsr_fsdp, unit: usize) -> tsr_status;
    fn tsr_fsdp_backward(fsdp: *mut tsr_fsdp, unit: usize) -> tsr_status;
    fn tsr_fsdp_unused(fsdp: *mut tsr_fsdp, index: usize) -> tsr_status;
    fn tsr_fsdp_used(fsdp: *const tsr_fsdp, index: usize, used: *mut i32) -> tsr_status;
    fn tsr_fsdp_grads_ready(fsdp: *mut tsr_fsdp, unit: usize) -> tsr_status;
    fn tsr_fsdp_wait(fsdp: *mut tsr_fsdp) -> tsr_status;
    fn tsr_fsdp_abandon(fsdp: *mut tsr_fsdp) -> tsr_status;
    fn tsr_fsdp_unshard(fsdp: *mut tsr_fsdp, unit: usize) -> tsr_status;
    fn tsr_fsdp_await(fsdp: *mut tsr_fsdp, unit: usize) -> tsr_status;
    fn tsr_fsdp_reshard(fsdp: *mut tsr_fsdp, unit: usize) -> tsr_status;
    fn tsr_fsdp_set_sync(fsdp: *mut tsr_fsdp, sync: i32) -> tsr_status;
    fn tsr_fsdp_set_accumulate(fsdp: *mut tsr_fsdp, accumulate: i32) -> tsr_status;
    fn tsr_fsdp_set_all_reduce(fsdp: *mut tsr_fsdp, all_reduce: i32) -> tsr_status;
    fn tsr_fsdp_set_reshard_after_backward(fsdp: *mut tsr_fsdp, unit: usize, reshard: i32) -> tsr_status;
    fn tsr_fsdp_zero_grad(fsdp: *mut tsr_fsdp) -> tsr_status;
    fn tsr_fsdp_destroy(fsdp: *mut tsr_fsdp);
}
