//! `tessera/store.h`.

use crate::{tsr_status, tsr_store, tsr_store_server};
use std::ffi::{c_char, c_void};

structs! {
    /// `tsr_store_options`.
    struct tsr_store_options {
        struct_size: usize,
        timeout_ms: i32,
        insecure: i32,
        token: *const c_char,
        job_id: *const c_char,
        epoch: u64,
    }
}

functions! { "store":
    fn tsr_store_options_init(options: *mut tsr_store_options, struct_size: usize) -> tsr_status;
    fn tsr_store_serve(
        host: *const c_char,
        port: u16,
        options: *const tsr_store_options,
        out: *mut *mut tsr_store_server,
    ) -> tsr_status;
    fn tsr_store_server_port(server: *const tsr_store_server, port: *mut u16) -> tsr_status;
    fn tsr_store_server_destroy(server: *mut tsr_store_server);
    fn tsr_store_open(uri: *const c_char, options: *const tsr_store_options, out: *mut *mut tsr_store) -> tsr_status;
    fn tsr_store_destroy(store: *mut tsr_store);
    fn tsr_store_set(store: *const tsr_store, key: *const c_char, value: *const c_void, size: usize) -> tsr_status;
    fn tsr_store_get(
        store: *const tsr_store,
        key: *const c_char,
        value: *mut c_void,
        capacity: usize,
        size: *mut usize,
    ) -> tsr_status;
    fn tsr_store_wait(store: *const tsr_store, key: *const c_char, timeout_ms: i32) -> tsr_status;
    fn tsr_store_add(store: *const tsr_store, key: *const c_char, delta: i64, result: *mut i64) -> tsr_status;
    fn tsr_store_compare_set(
        store: *const tsr_store,
        key: *const c_char,
        expected: *const c_void,
        expected_size: usize,
        desired: *const c_void,
        desired_size: usize,
        swapped: *mut i32,
    ) -> tsr_status;
    fn tsr_store_delete(store: *const tsr_store, key: *const c_char, existed: *mut i32) -> tsr_status;
}
