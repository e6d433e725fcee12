//! Strings of C. Apart from `raw`, since an error reads its own with them.

use std::ffi::{c_char, CStr};

/// # Safety
/// `text` is null or a string that ends with 0.
pub(crate) unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
