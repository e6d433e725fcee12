//! `tessera/state.h`.

use crate::{
    tsr_comm, tsr_ddp, tsr_destroy_fn, tsr_dtype, tsr_fsdp, tsr_grad_scaler, tsr_layout, tsr_optimizer, tsr_param,
    tsr_sampler, tsr_state, tsr_status, tsr_tensor,
};
use std::ffi::{c_char, c_void};

/// `tsr_state_collect_fn`.
pub type tsr_state_collect_fn = Option<unsafe extern "C" fn(*mut tsr_state, *mut c_char, *mut c_void) -> i32>;
/// `tsr_state_take_fn`.
pub type tsr_state_take_fn = Option<unsafe extern "C" fn(*const tsr_state, *mut c_char, *mut c_void) -> i32>;

structs! {
    /// `tsr_state_source`.
    struct tsr_state_source {
        struct_size: usize,
        collect: tsr_state_collect_fn,
        check: tsr_state_take_fn,
        apply: tsr_state_take_fn,
        destroy: tsr_destroy_fn,
        user_data: *mut c_void,
    }
}

functions! { "state":
    fn tsr_state_create(out: *mut *mut tsr_state) -> tsr_status;
    fn tsr_state_add_tensor(state: *mut tsr_state, name: *const c_char, tensor: *const tsr_tensor) -> tsr_status;
    fn tsr_state_add_sharded(
        state: *mut tsr_state,
        name: *const c_char,
        layout: *const tsr_layout,
        dtype: tsr_dtype,
        pieces: *const tsr_tensor,
        rank: i32,
    ) -> tsr_status;
    fn tsr_state_add_ddp(state: *mut tsr_state, prefix: *const c_char, ddp: *mut tsr_ddp) -> tsr_status;
    fn tsr_state_add_fsdp(state: *mut tsr_state, prefix: *const c_char, fsdp: *mut tsr_fsdp) -> tsr_status;
    fn tsr_state_add_optimizer(
        state: *mut tsr_state,
        prefix: *const c_char,
        optimizer: *mut tsr_optimizer,
    ) -> tsr_status;
    fn tsr_state_add_grad_scaler(
        state: *mut tsr_state,
        prefix: *const c_char,
        scaler: *mut tsr_grad_scaler,
    ) -> tsr_status;
    fn tsr_state_add_sampler(state: *mut tsr_state, prefix: *const c_char, sampler: *mut tsr_sampler) -> tsr_status;
    fn tsr_state_add_source(
        state: *mut tsr_state,
        prefix: *const c_char,
        source: *const tsr_state_source,
    ) -> tsr_status;
    fn tsr_state_set_int64(state: *mut tsr_state, name: *const c_char, value: i64) -> tsr_status;
    fn tsr_state_get_int64(state: *const tsr_state, name: *const c_char, value: *mut i64) -> tsr_status;
    fn tsr_state_set_double(state: *mut tsr_state, name: *const c_char, value: f64) -> tsr_status;
    fn tsr_state_get_double(state: *const tsr_state, name: *const c_char, value: *mut f64) -> tsr_status;
    fn tsr_state_set_value(state: *mut tsr_state, name: *const c_char, json: *const c_char) -> tsr_status;
    fn tsr_state_get_value(
        state: *const tsr_state,
        name: *const c_char,
        json: *mut c_char,
        capacity: usize,
        size: *mut usize,
    ) -> tsr_status;
    fn tsr_state_tensor_count(state: *const tsr_state, count: *mut usize) -> tsr_status;
    fn tsr_state_tensor(state: *const tsr_state, index: usize, tensor: *mut tsr_param) -> tsr_status;
    fn tsr_state_gather(
        state: *mut tsr_state,
        comm: *mut tsr_comm,
        name: *const c_char,
        root: i32,
        whole: *const tsr_tensor,
    ) -> tsr_status;
    fn tsr_state_set_metric(state: *mut tsr_state, name: *const c_char, value: f64) -> tsr_status;
    fn tsr_state_destroy(state: *mut tsr_state);
}
