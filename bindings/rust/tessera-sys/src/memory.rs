//! `tessera/memory.h`.

use crate::{tsr_buffer, tsr_comm, tsr_status};
use std::ffi::c_void;

functions! { "memory":
    fn tsr_buffer_create(comm: *mut tsr_comm, size: usize, out: *mut *mut tsr_buffer) -> tsr_status;
    fn tsr_buffer_data(buffer: *const tsr_buffer, data: *mut *mut c_void, size: *mut usize) -> tsr_status;
    fn tsr_buffer_destroy(buffer: *mut tsr_buffer);
}
