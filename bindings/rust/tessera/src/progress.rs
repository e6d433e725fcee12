//! Progress of saves, loads and verifications.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use tessera_sys as sys;

use crate::raw;

/// The phase of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// [`Saver::save_async`](crate::Saver::save_async) copies the state before it returns.
    Stage,
    /// This rank writes its files.
    Write,
    /// All ranks have written. Reported on rank 0 only, without bytes.
    Commit,
    /// A checkpoint is being loaded.
    Read,
    /// A checkpoint is being verified.
    Verify,
}

/// The progress of a save, a load or a verification on this rank, reported at the beginning and the end of a phase and
/// about ten times a second in between. `done` equals `total` only at the end; a phase that fails has no end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// The phase of an operation.
    pub phase: Phase,
    /// Bytes done.
    pub done: u64,
    /// Bytes in total; 0 if there is nothing to count.
    pub total: u64,
}

/// A user's callback, and the first panic in it. A panic does not stop the operation, because other ranks depend on it;
/// it resumes in `settle`, on the user's own thread.
pub(crate) struct Watcher<'a> {
    callback: Box<dyn Fn(Progress) + 'a>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl<'a> Watcher<'a> {
    pub(crate) fn new(callback: impl Fn(Progress) + 'a) -> Self {
        Watcher { callback: Box::new(callback), panic: Mutex::new(None) }
    }

    /// What C hands back to [`watch`]; this must stay where it is for as long as C may call.
    pub(crate) fn user_data(&self) -> *mut c_void {
        ptr::from_ref(self).cast_mut().cast()
    }

    fn caught(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn settle(&self) {
        let caught = self.caught().take();
        if let Some(panic) = caught {
            panic::resume_unwind(panic);
        }
    }
}

impl fmt::Debug for Watcher<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watcher").finish_non_exhaustive()
    }
}

impl Drop for Watcher<'_> {
    fn drop(&mut self) {
        if let Some(panic) = self.caught().take() {
            raw::discard(panic);
        }
    }
}

/// The library's progress callback.
pub(crate) unsafe extern "C" fn watch(phase: i32, done: i64, total: i64, user_data: *mut c_void) {
    // SAFETY: a Watcher's own `user_data`; whoever gave it to C keeps the Watcher until C is done with it.
    let watcher = unsafe { &*user_data.cast_const().cast::<Watcher<'_>>() };
    let phase = match phase {
        sys::TSR_PHASE_STAGE => Phase::Stage,
        sys::TSR_PHASE_WRITE => Phase::Write,
        sys::TSR_PHASE_COMMIT => Phase::Commit,
        sys::TSR_PHASE_READ => Phase::Read,
        sys::TSR_PHASE_VERIFY => Phase::Verify,
        _ => return, // of a newer library
    };
    if watcher.caught().is_some() {
        return;
    }
    let bytes = |count| u64::try_from(count).unwrap_or(0);
    let progress = Progress { phase, done: bytes(done), total: bytes(total) };
    if let Err(panic) = panic::catch_unwind(AssertUnwindSafe(|| (watcher.callback)(progress))) {
        let second = match &mut *watcher.caught() {
            Some(_) => Some(panic),
            none => {
                *none = Some(panic);
                None
            }
        };
        second.into_iter().for_each(raw::discard);
    }
}
