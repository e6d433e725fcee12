//! `tessera/error.h`.

use crate::{tsr_error, tsr_status};
use std::ffi::c_char;

constants! { i32:
    TSR_OK = 0;
    TSR_E_INVALID_ARGUMENT = 1;
    TSR_E_INVALID_STATE = 2;
    TSR_E_TIMEOUT = 3;
    TSR_E_ABORTED = 4;
    TSR_E_PEER_LOST = 5;
    TSR_E_MISMATCH = 6;
    TSR_E_IO = 7;
    TSR_E_CORRUPT = 8;
    TSR_E_NOT_FOUND = 9;
    TSR_E_NOT_READY = 10;
    TSR_E_INTERRUPTED = 11;
    TSR_E_COMMIT_UNKNOWN = 12;
    TSR_E_NO_MEMORY = 13;
    TSR_E_UNSUPPORTED = 14;
    TSR_E_VERSION = 15;
    TSR_E_PERMISSION = 16;
    TSR_E_CUDA = 17;
    TSR_E_NCCL = 18;
    TSR_E_USER = 19;
    TSR_E_INTERNAL = 20;
    TSR_NATIVE_NONE = 0;
    TSR_NATIVE_ERRNO = 1;
    TSR_NATIVE_CUDA = 2;
    TSR_NATIVE_NCCL = 3;
    TSR_NATIVE_USER = 4;
}

functions! { "error":
    fn tsr_status_name(status: tsr_status) -> *const c_char;
    fn tsr_error_last() -> *const tsr_error;
    fn tsr_error_take(out: *mut *mut tsr_error) -> tsr_status;
    fn tsr_error_destroy(error: *mut tsr_error);
    fn tsr_error_code(error: *const tsr_error) -> tsr_status;
    fn tsr_error_message(error: *const tsr_error) -> *const c_char;
    fn tsr_error_cause(error: *const tsr_error) -> *const tsr_error;
    fn tsr_error_rank(error: *const tsr_error) -> i32;
    fn tsr_error_peer(error: *const tsr_error) -> i32;
    fn tsr_error_operation(error: *const tsr_error) -> *const c_char;
    fn tsr_error_sequence(error: *const tsr_error) -> i64;
    fn tsr_error_native(error: *const tsr_error, domain: *mut i32) -> i32;
    fn tsr_error_retriable(error: *const tsr_error) -> i32;
}
