//! What the launcher tells the ranks, and they it.

use tessera_sys as sys;

use crate::error::{check, Result};
use crate::raw;

/// Whether the launcher was asked to stop: save and return soon. Always false outside `tessera run`. Costs nothing.
pub fn preempt_requested() -> bool {
    // SAFETY: the library is loaded.
    crate::load().is_ok() && unsafe { sys::tsr_preempt_requested() } != 0
}

/// Tells the launcher why this process fails, for its summary. The first call of a process counts. Does nothing outside
/// a launcher.
///
/// # Errors
/// `Io`: the file that the launcher named cannot be written; `InvalidArgument`: a zero byte.
pub fn record_error(message: &str, traceback: Option<&str>) -> Result<()> {
    crate::load()?;
    let message = raw::c_string("the message", message)?;
    let traceback = traceback.map(|text| raw::c_string("the traceback", text)).transpose()?;
    // SAFETY: the strings are borrowed for the call.
    check(unsafe { sys::tsr_record_error(message.as_ptr(), raw::pointer(&traceback)) })
}
