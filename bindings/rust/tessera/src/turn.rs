//! Turns: one rank works alone while the others wait for it.

use std::ffi::{CStr, CString};
use std::fmt::{self, Display};
use std::ptr::{self, NonNull};
use std::thread;
use std::time::Duration;

use tessera_sys as sys;

use crate::comm::{Borrowed, Comm};
use crate::error::{check, Error, Result};
use crate::raw::{self, created};

/// The turn of one rank: see [`Comm::turn`].
pub struct Turn<'c> {
    handle: NonNull<sys::tsr_turn>,
    ended: bool,
    _comm: Borrowed<'c>,
}

impl Comm {
    /// Lets one rank work alone, as in an evaluation on rank 0, while the others wait for it. Every rank calls it. A rank
    /// that dies is noticed at once, as in any collective.
    ///
    /// `timeout` is how long the others wait for the end, or for the next [`Turn::progress`]; the timeout of the
    /// communicator does not apply to them. Returns what `work` returns, on the rank whose turn it is; `None` on the
    /// others. Inside `work`, the communicator refuses everything else, also another turn, with `InvalidState`.
    ///
    /// # Errors
    /// That of `work`, on its rank; the others get its text as [`User`](crate::Code::User). `Timeout`: the rank neither
    /// ended nor reported progress in time, or another did not come; `InvalidArgument`, `InvalidState`, `PeerLost`,
    /// `Aborted`, `Mismatch`, `Interrupted`.
    ///
    /// ```
    /// # fn main() -> tessera::Result<()> {
    /// use std::time::Duration;
    /// let comm = tessera::Comm::from_env()?;
    /// let accuracy = comm.turn(0, Duration::from_secs(600), |turn| {
    ///     turn.progress(1, 1)?;
    ///     Ok::<_, tessera::Error>(0.97)
    /// })?;
    /// assert_eq!(accuracy, Some(0.97));
    /// # Ok(()) }
    /// ```
    pub fn turn<T, E: From<Error> + Display>(
        &self,
        rank: usize,
        timeout: Duration,
        work: impl FnOnce(&mut Turn<'_>) -> std::result::Result<T, E>,
    ) -> std::result::Result<Option<T>, E> {
        let number = raw::int32("the rank", rank)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the communicator outlives the turn.
        check(unsafe { sys::tsr_turn_create(self.as_ptr(), number, raw::milliseconds(timeout), &mut handle) })?;
        let mut turn = Turn { handle: created(handle)?, ended: false, _comm: Borrowed::new() };
        if rank != self.rank()? {
            turn.end(None)?;
            return Ok(None);
        }
        match work(&mut turn) {
            Ok(result) => {
                turn.end(None)?;
                Ok(Some(result))
            }
            Err(error) => {
                // Its own error says more than that of the end.
                let _ = turn.fail(&error.to_string());
                Err(error)
            }
        }
    }
}

impl Turn<'_> {
    /// Reports progress, after which the others wait up to the timeout again: `done` steps of `total`, or of an unknown
    /// number if that is 0. The others log a report every 10 s, and name the last one if they time out. Does not wait.
    ///
    /// # Errors
    /// What a peer failed with while it waited: `PeerLost`, `Aborted`, `Timeout`, `Mismatch`; `InvalidArgument`.
    pub fn progress(&mut self, done: usize, total: usize) -> Result<()> {
        let (done, total) = (raw::int64("the steps done", done)?, raw::int64("the total of steps", total)?);
        // SAFETY: the handle is alive, its communicator is used by this thread alone; so below.
        check(unsafe { sys::tsr_turn_progress(self.handle.as_ptr(), done, total) })
    }

    fn fail(&mut self, why: &str) -> Result<()> {
        let why = CString::new(why.replace('\0', " ")).unwrap_or_default();
        self.end(Some(&why))
    }

    fn end(&mut self, failure: Option<&CStr>) -> Result<()> {
        self.ended = true;
        let failure = failure.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: the text is null or borrowed for the call.
        check(unsafe { sys::tsr_turn_end(self.handle.as_ptr(), failure) })
    }
}

impl fmt::Debug for Turn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.ended && thread::panicking() {
            let _ = self.fail("it panicked");
        }
        // SAFETY: the handle is ours and not used again.
        unsafe { sys::tsr_turn_destroy(self.handle.as_ptr()) }
    }
}
