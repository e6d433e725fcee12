//! `tessera/ddp.h`.

use crate::{tsr_comm, tsr_ddp, tsr_param, tsr_status, tsr_tensor};

structs! {
    /// `tsr_ddp_options`.
    struct tsr_ddp_options {
        struct_size: usize,
        bucket_bytes: usize,
        first_bucket_bytes: usize,
        op: i32,
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
    fn tsr_ddp_zero_grad(ddp: *mut tsr_ddp) -> tsr_status;
    fn tsr_ddp_destroy(ddp: *mut tsr_ddp);
}
