//! `tessera/comm.h`.

use crate::{tsr_comm, tsr_destroy_fn, tsr_error, tsr_reduce_op, tsr_status, tsr_store, tsr_tensor, tsr_work};
use std::ffi::{c_char, c_void};

/// `tsr_work_fn`.
pub type tsr_work_fn = Option<unsafe extern "C" fn(status: tsr_status, user_data: *mut c_void)>;

structs! {
    /// `tsr_comm_options`.
    struct tsr_comm_options {
        struct_size: usize,
        timeout_ms: i32,
        spin_count: i32,
        backend: *const c_char,
        name: *const c_char,
        heartbeat_timeout_ms: i32,
    }
}

functions! { "comm":
    fn tsr_comm_options_init(options: *mut tsr_comm_options, struct_size: usize) -> tsr_status;
    fn tsr_comm_from_env(options: *const tsr_comm_options, out: *mut *mut tsr_comm) -> tsr_status;
    fn tsr_comm_create(
        store: *mut tsr_store,
        rank: i32,
        world_size: i32,
        options: *const tsr_comm_options,
        out: *mut *mut tsr_comm,
    ) -> tsr_status;
    fn tsr_comm_split(
        comm: *mut tsr_comm,
        color: i32,
        key: i32,
        options: *const tsr_comm_options,
        out: *mut *mut tsr_comm,
    ) -> tsr_status;
    fn tsr_comm_shrink(
        comm: *mut tsr_comm,
        options: *const tsr_comm_options,
        out: *mut *mut tsr_comm,
    ) -> tsr_status;
    fn tsr_comm_finalize(comm: *mut tsr_comm) -> tsr_status;
    fn tsr_comm_abort(comm: *const tsr_comm, reason: *const c_char) -> tsr_status;
    fn tsr_comm_destroy(comm: *mut tsr_comm);
    fn tsr_comm_rank(comm: *const tsr_comm, rank: *mut i32) -> tsr_status;
    fn tsr_comm_world_size(comm: *const tsr_comm, world_size: *mut i32) -> tsr_status;
    fn tsr_comm_transport(comm: *const tsr_comm, name: *mut *const c_char) -> tsr_status;
    fn tsr_comm_error(comm: *const tsr_comm, error: *mut *mut tsr_error) -> tsr_status;
    fn tsr_comm_set_timeout(comm: *const tsr_comm, timeout_ms: i32) -> tsr_status;
    fn tsr_comm_timeout(comm: *const tsr_comm, timeout_ms: *mut i32) -> tsr_status;
    fn tsr_comm_write_trace(comm: *const tsr_comm, path: *const c_char) -> tsr_status;
    fn tsr_comm_all_reduce(
        comm: *mut tsr_comm,
        tensors: *const tsr_tensor,
        n: usize,
        op: tsr_reduce_op,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_reduce_scatter(
        comm: *mut tsr_comm,
        input: *const tsr_tensor,
        output: *const tsr_tensor,
        op: tsr_reduce_op,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_all_gather(
        comm: *mut tsr_comm,
        input: *const tsr_tensor,
        output: *const tsr_tensor,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_reduce_scatter_coalesced(
        comm: *mut tsr_comm,
        inputs: *const tsr_tensor,
        outputs: *const tsr_tensor,
        n: usize,
        op: tsr_reduce_op,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_all_gather_coalesced(
        comm: *mut tsr_comm,
        inputs: *const tsr_tensor,
        outputs: *const tsr_tensor,
        n: usize,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_all_gather_v(
        comm: *mut tsr_comm,
        input: *const tsr_tensor,
        outputs: *const tsr_tensor,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_broadcast(
        comm: *mut tsr_comm,
        tensors: *const tsr_tensor,
        n: usize,
        root: i32,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_reduce(
        comm: *mut tsr_comm,
        input: *const tsr_tensor,
        output: *const tsr_tensor,
        op: tsr_reduce_op,
        root: i32,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_gather(
        comm: *mut tsr_comm,
        input: *const tsr_tensor,
        output: *const tsr_tensor,
        root: i32,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_scatter(
        comm: *mut tsr_comm,
        input: *const tsr_tensor,
        output: *const tsr_tensor,
        root: i32,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_all_to_all(
        comm: *mut tsr_comm,
        input: *const tsr_tensor,
        output: *const tsr_tensor,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_send(
        comm: *mut tsr_comm,
        tensor: *const tsr_tensor,
        peer: i32,
        tag: i32,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_recv(
        comm: *mut tsr_comm,
        tensor: *const tsr_tensor,
        peer: i32,
        tag: i32,
        stream: *mut c_void,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_comm_barrier(comm: *mut tsr_comm, work: *mut *mut tsr_work) -> tsr_status;
    fn tsr_work_wait(work: *const tsr_work, timeout_ms: i32) -> tsr_status;
    fn tsr_work_test(work: *const tsr_work, done: *mut i32) -> tsr_status;
    fn tsr_work_error(work: *const tsr_work, error: *mut *mut tsr_error) -> tsr_status;
    fn tsr_work_staged(work: *const tsr_work, staged: *mut *mut tsr_work) -> tsr_status;
    fn tsr_work_on_done(
        work: *const tsr_work,
        function: tsr_work_fn,
        user_data: *mut c_void,
        destroy: tsr_destroy_fn,
    ) -> tsr_status;
    fn tsr_work_destroy(work: *mut tsr_work);
}
