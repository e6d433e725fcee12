//! `tessera/ddp.h`.

use std::ffi::c_void;

use crate::{tsr_comm, tsr_ddp, tsr_destroy_fn, tsr_optimizer, tsr_param, tsr_status, tsr_tensor};

constants! { i32:
    TSR_DDP_HOOK_ALL_REDUCE = 0;
    TSR_DDP_HOOK_POWER_SGD = 1;
    TSR_DDP_HOOK_NOOP = 2;
    TSR_DDP_JOIN_OFF = 0;
    TSR_DDP_JOIN_DIVIDE_BY_WORLD = 1;
    TSR_DDP_JOIN_DIVIDE_BY_ACTIVE = 2;
}

/// `tsr_ddp_hook_fn`.
pub type tsr_ddp_hook_fn = Option<unsafe extern "C" fn(bucket: *const tsr_ddp_bucket, user_data: *mut c_void) -> i32>;

structs! {
    /// `tsr_ddp_options`.
    struct tsr_ddp_options {
        struct_size: usize,
        bucket_bytes: usize,
        first_bucket_bytes: usize,
        op: i32,
        pre_divide: f64,
        find_unused: i32,
        static_graph: i32,
        rebuild_buckets: i32,
        reduce_dtype: i32,
        hook: i32,
        powersgd_rank: i32,
        powersgd_start_step: i32,
        join: i32,
        share_params: i32,
    }
    /// `tsr_bucket_stats`.
    struct tsr_bucket_stats {
        struct_size: usize,
        size_bytes: usize,
        params: usize,
        ready_ns: i64,
        start_ns: i64,
        end_ns: i64,
        exposed_ns: i64,
    }
    /// `tsr_ddp_bucket`.
    struct tsr_ddp_bucket {
        bucket: usize,
        n: usize,
        params: *const usize,
        grads: *const tsr_tensor,
        comm: *mut tsr_comm,
    }
}

functions! { "ddp":
    fn tsr_ddp_options_init(options: *mut tsr_ddp_options, struct_size: usize) -> tsr_status;
    fn tsr_ddp_create(
        comm: *mut tsr_comm,
        params: *const tsr_param,
        n: usize,
        options: *const tsr_ddp_options,
        out: *mut *mut tsr_ddp,
    ) -> tsr_status;
    fn tsr_ddp_param_count(ddp: *const tsr_ddp, count: *mut usize) -> tsr_status;
    fn tsr_ddp_param(ddp: *const tsr_ddp, index: usize, param: *mut tsr_param) -> tsr_status;
    fn tsr_ddp_grad(ddp: *const tsr_ddp, index: usize, grad: *mut tsr_tensor) -> tsr_status;
    fn tsr_ddp_ready(ddp: *mut tsr_ddp, index: usize) -> tsr_status;
    fn tsr_ddp_ready_all(ddp: *mut tsr_ddp) -> tsr_status;
    fn tsr_ddp_wait(ddp: *mut tsr_ddp) -> tsr_status;
    fn tsr_ddp_set_sync(ddp: *mut tsr_ddp, sync: i32) -> tsr_status;
    fn tsr_ddp_used(ddp: *mut tsr_ddp, index: usize, used: *mut i32) -> tsr_status;
    fn tsr_ddp_bucket_count(ddp: *mut tsr_ddp, count: *mut usize) -> tsr_status;
    fn tsr_ddp_stats(ddp: *mut tsr_ddp, bucket: usize, stats: *mut tsr_bucket_stats) -> tsr_status;
    fn tsr_ddp_set_hook(
        ddp: *mut tsr_ddp,
        hook: tsr_ddp_hook_fn,
        user_data: *mut c_void,
        destroy_data: tsr_destroy_fn,
    ) -> tsr_status;
    fn tsr_ddp_step_in_backward(ddp: *mut tsr_ddp, optimizer: *mut tsr_optimizer) -> tsr_status;
    fn tsr_ddp_register_buffers(ddp: *mut tsr_ddp, buffers: *const tsr_param, n: usize) -> tsr_status;
    fn tsr_ddp_broadcast_buffers(ddp: *mut tsr_ddp) -> tsr_status;
    fn tsr_ddp_join(ddp: *mut tsr_ddp, sync_params: i32) -> tsr_status;
    fn tsr_ddp_shared_step(ddp: *mut tsr_ddp, steps: *mut i64) -> tsr_status;
    fn tsr_ddp_zero_grad(ddp: *mut tsr_ddp) -> tsr_status;
    fn tsr_ddp_destroy(ddp: *mut tsr_ddp);
}
