//! The library's log, and interruption of calls that wait.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void};
use std::panic::{self, AssertUnwindSafe};
use std::ptr;

use tessera_sys as sys;

use crate::error::{check, Result};
use crate::raw;

/// The severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// For debugging.
    Debug,
    /// Normal events.
    Info,
    /// Possible problems.
    Warning,
    /// Errors.
    Error,
}

/// Drops lines below `level`; `None` drops all. The environment's `TESSERA_LOG` is the default.
///
/// # Errors
/// Those of [`load`](crate::load).
pub fn set_log_level(level: Option<Level>) -> Result<()> {
    crate::load()?;
    // SAFETY: the library is loaded.
    check(unsafe {
        sys::tsr_log_set_level(match level {
            Some(Level::Debug) => sys::TSR_LOG_DEBUG,
            Some(Level::Info) => sys::TSR_LOG_INFO,
            Some(Level::Warning) => sys::TSR_LOG_WARNING,
            Some(Level::Error) => sys::TSR_LOG_ERROR,
            None => sys::TSR_LOG_OFF,
        })
    })
}

type LogFn = Box<dyn Fn(Level, &str) + Send + Sync>;

/// Sends the log to `callback` instead of standard error, line by line, on any thread. It must not call this crate. A
/// panic in it is caught and ends there.
///
/// # Errors
/// Those of [`load`](crate::load).
pub fn set_log_callback(callback: impl Fn(Level, &str) + Send + Sync + 'static) -> Result<()> {
    crate::load()?;
    let callback: Box<LogFn> = Box::new(Box::new(callback));
    // SAFETY: the library owns the box until it calls `free_log`, once the callback is replaced.
    check(unsafe { sys::tsr_log_set_callback(Some(log_line), Box::into_raw(callback).cast(), Some(free_log)) })
}

/// Sends the log to standard error again.
///
/// # Errors
/// Those of [`load`](crate::load).
pub fn reset_log_callback() -> Result<()> {
    crate::load()?;
    // SAFETY: the library is loaded.
    check(unsafe { sys::tsr_log_set_callback(None, ptr::null_mut(), None) })
}

unsafe extern "C" fn log_line(level: i32, line: *const c_char, user_data: *mut c_void) {
    // SAFETY: `set_log_callback` passed this box, which lives until `free_log`; the line is a string.
    let (callback, line) = unsafe { (&*user_data.cast_const().cast::<LogFn>(), raw::text(line)) };
    let level = match level {
        sys::TSR_LOG_DEBUG => Level::Debug,
        sys::TSR_LOG_INFO => Level::Info,
        sys::TSR_LOG_WARNING => Level::Warning,
        _ => Level::Error,
    };
    raw::contained(|| callback(level, &line));
}

unsafe extern "C" fn free_log(user_data: *mut c_void) {
    // SAFETY: the box of `set_log_callback`, given back once.
    let callback = unsafe { Box::from_raw(user_data.cast::<LogFn>()) };
    raw::contained(|| drop(callback));
}

/// Runs `body`. Meanwhile every waiting call of this thread polls `interrupted` at least every 100 ms, and returns
/// [`Code::Interrupted`](crate::Code::Interrupted) if it is true, so that a program can stop on Ctrl-C or a thread pool
/// can reclaim a thread.
///
/// A panic in `interrupted` interrupts the call and resumes when `body` has returned.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use std::sync::atomic::{AtomicBool, Ordering};
/// static STOP: AtomicBool = AtomicBool::new(false); // set by a signal handler, say
/// let comm = tessera::Comm::from_env()?;
/// tessera::with_interrupt(|| STOP.load(Ordering::Relaxed), || comm.barrier())?;
/// # Ok(()) }
/// ```
pub fn with_interrupt<R>(interrupted: impl FnMut() -> bool, body: impl FnOnce() -> R) -> R {
    if crate::load().is_err() {
        return body(); // whatever the body calls will say why
    }
    let check = Check { interrupted: RefCell::new(Box::new(interrupted)), panic: Cell::new(None) };
    let restore = Restore(CURRENT.replace(ptr::from_ref(&check).cast()));
    set(CURRENT.get());
    let result = body();
    drop(restore);
    if let Some(panic) = check.panic.take() {
        panic::resume_unwind(panic);
    }
    result
}

struct Check<'a> {
    interrupted: RefCell<Box<dyn FnMut() -> bool + 'a>>,
    panic: Cell<Option<Box<dyn Any + Send>>>,
}

thread_local! {
    /// The innermost `Check` of this thread.
    static CURRENT: Cell<*const c_void> = const { Cell::new(ptr::null()) };
}

/// Restores the outer check, even when the body unwinds.
struct Restore(*const c_void);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0);
        set(self.0);
    }
}

fn set(check: *const c_void) {
    let function: sys::tsr_interrupt_fn = if check.is_null() { None } else { Some(poll) };
    // SAFETY: the library is loaded; the check lives until it is replaced. The call always returns OK.
    let _ = unsafe { sys::tsr_interrupt_set(function, check.cast_mut()) };
}

unsafe extern "C" fn poll(user_data: *mut c_void) -> i32 {
    // SAFETY: `with_interrupt` passed it and is still running on this thread.
    let check = unsafe { &*user_data.cast_const().cast::<Check<'_>>() };
    let Ok(mut interrupted) = check.interrupted.try_borrow_mut() else {
        return 0; // the callback itself waits on the library
    };
    match panic::catch_unwind(AssertUnwindSafe(&mut *interrupted)) {
        Ok(stop) => i32::from(stop),
        Err(panic) => {
            match check.panic.take() {
                None => check.panic.set(Some(panic)),
                first => {
                    check.panic.set(first);
                    raw::discard(panic);
                }
            }
            1
        }
    }
}
