//! The results of user callbacks, whose errors and panics are passed to C as a status and a message.

use std::any::Any;
use std::error::Error as StdError;
use std::ffi::c_char;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;

use tessera_sys as sys;

use crate::error::{Code, Error};
use crate::raw;

/// The result of a method of a [`Storage`](crate::Storage), [`Stateful`](crate::Stateful) or [`Stages`](crate::Stages)
/// object, with any error. An [`io::Error`] or [`Error`] makes the save, load or step fail with an error of the same
/// kind; others become [`Code::User`].
pub type CallbackResult<T> = std::result::Result<T, Box<dyn StdError + Send + Sync>>;

/// The status of a callback failure that has no code.
pub(crate) const FAILED: i32 = -1;

fn status_of(error: &(dyn StdError + Send + Sync + 'static)) -> i32 {
    if let Some(error) = error.downcast_ref::<Error>() {
        return error.code().as_raw();
    }
    let Some(error) = error.downcast_ref::<io::Error>() else { return FAILED };
    let code = match error.kind() {
        io::ErrorKind::NotFound => Code::NotFound,
        io::ErrorKind::PermissionDenied => Code::Permission,
        io::ErrorKind::TimedOut => Code::Timeout,
        io::ErrorKind::OutOfMemory => Code::NoMemory,
        io::ErrorKind::Unsupported => Code::Unsupported,
        _ => Code::Io,
    };
    code.as_raw()
}

/// Writes `text` to C's buffer, truncated between two characters.
///
/// # Safety
/// `message` has room for `TSR_MESSAGE_BYTES`.
unsafe fn say(message: *mut c_char, text: &str) {
    let text = text.replace('\0', " ");
    let mut end = text.len().min(sys::TSR_MESSAGE_BYTES as usize - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // SAFETY: the caller's promise.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr(), message.cast(), end);
        *message.add(end) = 0;
    }
}

/// Runs a method; its error, or its panic, becomes a status and a message.
///
/// # Safety
/// As `say`.
pub(crate) unsafe fn answer(message: *mut c_char, body: impl FnOnce() -> CallbackResult<i32>) -> i32 {
    match panic::catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(error)) => {
            // SAFETY: the caller's promise; so below.
            unsafe { say(message, &error.to_string()) };
            status_of(&*error)
        }
        Err(payload) => {
            unsafe { say(message, &format!("it panicked: {}", panic_text(&*payload))) };
            raw::discard(payload);
            FAILED
        }
    }
}

/// How a callback failed, for the thread that made the call.
pub(crate) enum Failure {
    Error(Box<dyn StdError + Send + Sync>),
    Panic(Box<dyn Any + Send>),
}

/// Runs a method once; its error, or its panic, becomes a status and a message, and is kept.
///
/// # Safety
/// As `say`.
pub(crate) unsafe fn answer_and_keep(
    message: *mut c_char,
    kept: &mut Option<Failure>,
    body: impl FnOnce() -> CallbackResult<()>,
) -> i32 {
    let told = || body().map_err(|error| (error.to_string(), error)); // whose text is the user's code, too
    let (text, status, failure) = match panic::catch_unwind(AssertUnwindSafe(told)) {
        Ok(Ok(())) => return sys::TSR_OK,
        Ok(Err((text, error))) => (text, status_of(&*error), Failure::Error(error)),
        Err(payload) => (format!("it panicked: {}", panic_text(&*payload)), FAILED, Failure::Panic(payload)),
    };
    *kept = Some(failure);
    // SAFETY: the caller's promise.
    unsafe { say(message, &text) };
    status
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)")
}
