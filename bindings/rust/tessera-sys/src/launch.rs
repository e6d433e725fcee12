//! `tessera/launch.h`.

use crate::tsr_status;
use std::ffi::c_char;

functions! { "launch":
    fn tsr_preempt_requested() -> i32;
    fn tsr_record_error(message: *const c_char, traceback: *const c_char) -> tsr_status;
    fn tsr_record_error_about(
        message: *const c_char,
        traceback: *const c_char,
        code: tsr_status,
        peer: i32,
    ) -> tsr_status;
}
