//! `tessera/log.h`.

use crate::{tsr_destroy_fn, tsr_status};
use std::ffi::{c_char, c_void};

/// `tsr_log_fn`.
pub type tsr_log_fn = Option<unsafe extern "C" fn(level: i32, line: *const c_char, user_data: *mut c_void)>;
/// `tsr_interrupt_fn`.
pub type tsr_interrupt_fn = Option<unsafe extern "C" fn(user_data: *mut c_void) -> i32>;

constants! { i32:
    TSR_LOG_DEBUG = 1;
    TSR_LOG_INFO = 2;
    TSR_LOG_WARNING = 3;
    TSR_LOG_ERROR = 4;
    TSR_LOG_OFF = 5;
}

functions! { "log":
    fn tsr_log_set_level(level: i32) -> tsr_status;
    fn tsr_log_set_callback(function: tsr_log_fn, user_data: *mut c_void, destroy: tsr_destroy_fn) -> tsr_status;
    fn tsr_interrupt_set(function: tsr_interrupt_fn, user_data: *mut c_void) -> tsr_status;
}
