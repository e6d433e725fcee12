//! `tessera/storage.h`.

use crate::{tsr_destroy_fn, tsr_status, tsr_storage};
use std::ffi::{c_char, c_void};

constants! { i32:
    TSR_STORAGE_PARTS_IN_ANY_ORDER = 1;
    TSR_STORAGE_PUT_IF_ABSENT = 2;
    TSR_STORAGE_OBJECT = 1;
    TSR_STORAGE_DIRECTORY = 2;
}

/// `tsr_storage_found_fn`.
pub type tsr_storage_found_fn = Option<unsafe extern "C" fn(name: *const c_char, found_data: *mut c_void)>;
/// `tsr_storage_status_fn`.
pub type tsr_storage_status_fn =
    Option<unsafe extern "C" fn(*const c_char, *mut i32, *mut i64, *mut i64, *mut c_char, *mut c_void) -> i32>;
/// `tsr_storage_open_fn`.
pub type tsr_storage_open_fn =
    Option<unsafe extern "C" fn(*const c_char, *mut *mut c_void, *mut i64, *mut c_char, *mut c_void) -> i32>;
/// `tsr_storage_read_fn`.
pub type tsr_storage_read_fn =
    Option<unsafe extern "C" fn(*mut c_void, i64, *mut c_void, i64, *mut i64, *mut c_char, *mut c_void) -> i32>;
/// `tsr_storage_close_fn`.
pub type tsr_storage_close_fn = Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>;
/// `tsr_storage_put_fn`.
pub type tsr_storage_put_fn =
    Option<unsafe extern "C" fn(*const c_char, *const c_void, i64, i32, *mut c_char, *mut c_void) -> i32>;
/// `tsr_storage_begin_fn`.
pub type tsr_storage_begin_fn =
    Option<unsafe extern "C" fn(*const c_char, i64, *mut *mut c_void, *mut c_char, *mut c_void) -> i32>;
/// `tsr_storage_part_fn`.
pub type tsr_storage_part_fn =
    Option<unsafe extern "C" fn(*mut c_void, i64, i64, *const c_void, i64, *mut c_char, *mut c_void) -> i32>;
/// `tsr_storage_finish_fn`.
pub type tsr_storage_finish_fn = Option<unsafe extern "C" fn(*mut c_void, *mut c_char, *mut c_void) -> i32>;
/// `tsr_storage_drop_fn`.
pub type tsr_storage_drop_fn = Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>;
/// `tsr_storage_list_fn`.
pub type tsr_storage_list_fn =
    Option<unsafe extern "C" fn(*const c_char, tsr_storage_found_fn, *mut c_void, *mut c_char, *mut c_void) -> i32>;
/// `tsr_storage_remove_fn`.
pub type tsr_storage_remove_fn = Option<unsafe extern "C" fn(*const c_char, *mut c_char, *mut c_void) -> i32>;

structs! {
    /// `tsr_storage_vtable`.
    struct tsr_storage_vtable {
        struct_size: usize,
        capabilities: i32,
        reserved: i32,
        part_bytes: i64,
        status: tsr_storage_status_fn,
        open: tsr_storage_open_fn,
        read: tsr_storage_read_fn,
        close: tsr_storage_close_fn,
        put: tsr_storage_put_fn,
        begin: tsr_storage_begin_fn,
        part: tsr_storage_part_fn,
        finish: tsr_storage_finish_fn,
        drop: tsr_storage_drop_fn,
        list: tsr_storage_list_fn,
        remove: tsr_storage_remove_fn,
        remove_directory: tsr_storage_remove_fn,
    }
}

functions! { "storage":
    fn tsr_storage_create(
        vtable: *const tsr_storage_vtable,
        user_data: *mut c_void,
        destroy: tsr_destroy_fn,
        out: *mut *mut tsr_storage,
    ) -> tsr_status;
    fn tsr_storage_destroy(storage: *mut tsr_storage);
}
