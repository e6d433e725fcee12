//! Communication with the launcher: preemption requests and error reports.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use tessera_sys as sys;

use crate::error::{check, Code, Result};
use crate::raw;

/// Whether the launcher was asked to stop; then save and return soon. Always false outside `tessera run`. Cheap.
pub fn preempt_requested() -> bool {
    // SAFETY: the library is loaded.
    crate::load().is_ok() && unsafe { sys::tsr_preempt_requested() } != 0
}

/// Reports to the launcher why this process fails, for its summary. Only the first call of a process counts. Does
/// nothing outside a launcher. [`record`] does it for an entire program.
///
/// # Errors
/// `Io`: the launcher's error file cannot be written; `InvalidArgument`: a zero byte.
pub fn record_error(message: &str, traceback: Option<&str>) -> Result<()> {
    crate::load()?;
    let message = raw::c_string("the message", message)?;
    let traceback = traceback.map(|text| raw::c_string("the traceback", text)).transpose()?;
    // SAFETY: the strings are borrowed for the call.
    check(unsafe { sys::tsr_record_error(message.as_ptr(), raw::pointer(&traceback)) })
}

/// [`record_error`] for an error that the program itself detected, for example while its ranks connect without the
/// library. `peer` is the rank that the error is about, by its `TESSERA_RANK`; for `Timeout`, `PeerLost` and `Aborted`
/// it is the cause, not this rank.
///
/// # Errors
/// `Io`: the launcher's error file cannot be written; `InvalidArgument`: a zero byte, or `code` is invalid.
pub fn record_error_about(message: &str, code: Code, peer: Option<usize>) -> Result<()> {
    crate::load()?;
    let message = raw::c_string("the message", message)?;
    let peer = peer.and_then(|rank| i32::try_from(rank).ok()).unwrap_or(-1);
    // SAFETY: the string is borrowed for the call.
    check(unsafe { sys::tsr_record_error_about(message.as_ptr(), std::ptr::null(), code.as_raw(), peer) })
}

/// Runs a program. An error that it returns, or a panic that ends it, is reported to the launcher, whose summary then
/// shows why this rank failed, and is passed on. Reports nothing outside a launcher.
///
/// The program's errors may have any type that implements `Display`: [`Error`](crate::Error), `Box<dyn Error>`,
/// `anyhow::Error`, `String`.
///
/// ```
/// use tessera::{Comm, ReduceOp};
///
/// fn main() -> tessera::Result<()> {
///     tessera::record(train)
/// }
///
/// fn train() -> tessera::Result<()> {
///     let comm = Comm::from_env()?;
///     let mut loss = [0.5f32];
///     comm.all_reduce(&mut loss, ReduceOp::Avg)?;
///     comm.finalize()
/// }
/// ```
///
/// # Errors
/// Those of the program.
pub fn record<T, E: fmt::Display + fmt::Debug>(program: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let outer = RECORDING.replace(true);
    note_panics();
    let outcome = panic::catch_unwind(AssertUnwindSafe(program));
    RECORDING.set(outer);
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            tell_of(&error);
            Err(error)
        }
        Err(payload) => {
            let (place, trace) = PANIC.take().unwrap_or_default();
            tell(&format!("panicked{place}: {}", text_of(&*payload)), trace.as_deref());
            panic::resume_unwind(payload)
        }
    }
}

pub(crate) fn tell_of<E: fmt::Display + fmt::Debug>(error: &E) {
    tell(&error.to_string(), Some(&format!("{error:?}")));
}

fn tell(message: &str, traceback: Option<&str>) {
    let traceback = traceback.map(|text| text.replace('\0', " "));
    if let Err(error) = record_error(&message.replace('\0', " "), traceback.as_deref()) {
        eprintln!("cannot report the error to the launcher: {error}");
    }
}

fn text_of(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(with a value that is not a string)")
}

thread_local! {
    /// Whether this thread is inside `record`.
    static RECORDING: Cell<bool> = const { Cell::new(false) };
    /// Where its last panic was, and the backtrace if RUST_BACKTRACE is set; only the panic hook knows them.
    static PANIC: RefCell<Option<(String, Option<String>)>> = const { RefCell::new(None) };
}

/// Installs a hook before the current one, once per process.
fn note_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let former = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if RECORDING.get() {
                let place = info.location().map_or(String::new(), |place| format!(" at {place}"));
                let trace = Backtrace::capture();
                let trace = (trace.status() == BacktraceStatus::Captured).then(|| trace.to_string());
                PANIC.set(Some((place, trace)));
            }
            former(info);
        }));
    });
}
