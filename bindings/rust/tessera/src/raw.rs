//! Between Rust's types and C's: handles, strings, paths, sizes, times, buffers of text.

use std::ffi::{c_char, CString};
use std::mem::{self, MaybeUninit};
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::ptr::NonNull;
use std::time::Duration;

use tessera_sys as sys;

use crate::error::{check, Code, Error, Result};
pub(crate) use crate::text::text;

/// A handle that a successful call has created.
pub(crate) fn created<T>(handle: *mut T) -> Result<NonNull<T>> {
    NonNull::new(handle).ok_or_else(|| Error::new(Code::Internal, "the library returned no handle"))
}

pub(crate) fn c_string(what: &str, value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| Error::new(Code::InvalidArgument, format!("{what} {value:?} contains a zero byte")))
}

pub(crate) fn path_string(path: &Path) -> Result<CString> {
    let text = path.to_str().ok_or_else(|| Error::argument(format!("the path {} is not UTF-8", path.display())))?;
    c_string("the path", text)
}

pub(crate) fn pointer(value: &Option<CString>) -> *const c_char {
    value.as_ref().map_or(std::ptr::null(), |value| value.as_ptr())
}

/// The C strings of a struct, for as long as C reads it.
#[derive(Default)]
pub(crate) struct Texts(Vec<CString>);

impl Texts {
    pub(crate) fn keep(&mut self, what: &str, value: &Option<String>) -> Result<Option<*const c_char>> {
        let Some(value) = value else { return Ok(None) };
        let text = c_string(what, value)?;
        let pointer = text.as_ptr(); // which stays when the CString moves
        self.0.push(text);
        Ok(Some(pointer))
    }
}

/// Converts a number to C's smaller or signed type.
pub(crate) fn fitting<C: TryFrom<N>, N: Copy + std::fmt::Display>(what: &str, value: Option<N>) -> Result<Option<C>> {
    let largest = if size_of::<C>() == size_of::<i32>() { i64::from(i32::MAX) } else { i64::MAX };
    let Some(value) = value else { return Ok(None) };
    C::try_from(value)
        .map(Some)
        .map_err(|_| Error::argument(format!("{what} is {value}; it must be at most {largest}")))
}

/// Milliseconds, rounded up so that a short wait does not become 0, and capped at C's maximum (24 days).
pub(crate) fn milliseconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
}

pub(crate) fn int32(what: &str, value: usize) -> Result<i32> {
    i32::try_from(value)
        .map_err(|_| Error::new(Code::InvalidArgument, format!("{what} is {value}; it must be at most {}", i32::MAX)))
}

pub(crate) fn int64(what: &str, value: usize) -> Result<i64> {
    i64::try_from(value)
        .map_err(|_| Error::new(Code::InvalidArgument, format!("{what} is {value}; it must be at most {}", i64::MAX)))
}

/// Reads what a C function of the kind `(buffer, capacity, &size)` returns, asking again while it grows.
pub(crate) fn read_sized(mut call: impl FnMut(*mut u8, usize, *mut usize) -> i32) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        let mut size = 0;
        let data = if bytes.is_empty() { std::ptr::null_mut() } else { bytes.as_mut_ptr() };
        check(call(data, bytes.len(), &mut size))?;
        if size <= bytes.len() {
            bytes.truncate(size);
            return Ok(bytes);
        }
        bytes.resize(size, 0);
    }
}

pub(crate) fn read_text(call: impl FnMut(*mut u8, usize, *mut usize) -> i32) -> Result<String> {
    let mut bytes = read_sized(call)?;
    bytes.pop(); // the final 0
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// A struct of options with the library's defaults.
///
/// # Safety
/// The library is loaded, and `init` is the C function that fills an `O`, a struct of numbers and pointers.
pub(crate) unsafe fn options<O>(init: unsafe fn(*mut O, usize) -> sys::tsr_status) -> Result<O> {
    let mut options = MaybeUninit::<O>::zeroed();
    // SAFETY: the struct is ours; zero, and what `init` writes, are values of its fields.
    unsafe {
        check(init(options.as_mut_ptr(), size_of::<O>()))?;
        Ok(options.assume_init())
    }
}

/// A tensor for the library to describe.
pub(crate) fn empty_tensor() -> sys::tsr_tensor {
    sys::tsr_tensor {
        data: std::ptr::null_mut(),
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        ndim: 0,
        dtype: 0,
        device_type: 0,
        device_index: 0,
        byte_offset: 0,
        reserved: [0; 3],
    }
}

/// Writes an option that was given.
pub(crate) fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

/// Runs user code that C called. A panic stops here, because unwinding into C would be undefined; the panic hook has
/// reported it.
pub(crate) fn contained(body: impl FnOnce()) {
    if let Err(panic) = panic::catch_unwind(AssertUnwindSafe(body)) {
        discard(panic);
    }
}

/// Drops a panic, whose payload is the user's and may panic in turn.
pub(crate) fn discard(payload: Box<dyn std::any::Any + Send>) {
    if let Err(again) = panic::catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(again);
    }
}
