//! The distributed sampler.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use tessera_sys as sys;

use crate::comm::Comm;
use crate::error::{check, Error, Result};
use crate::raw::{self, created};
use crate::settings::{sampler_setters, SamplerSettings};

/// Distributes samples over the ranks. The order of an epoch depends only on the seed, epoch and length, not on the
/// number of ranks, so that training can resume in mid-epoch with another number.
///
/// Unlike [`Ddp`](crate::Ddp), it may be moved to another thread (for example one that loads data) even though a
/// [`State`](crate::State) saves it: a save and a batch exclude each other.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{Comm, Sampler};
/// let comm = Comm::from_env()?;
/// let mut data = Sampler::new(&comm, 10).seed(7).build()?;
/// let mut seen = data.batch(4)?;
/// seen.extend(data.batch(4)?);
/// seen.extend(data.batch(4)?); // 2 are left in the epoch
/// seen.sort();
/// assert_eq!(seen, (0..10).collect::<Vec<_>>());
/// # Ok(()) }
/// ```
pub struct Sampler {
    inner: Arc<SamplerInner>,
    length: usize,
    /// The size of the last batch.
    last: usize,
}

/// Shared with the states whose C side points at it.
pub(crate) struct SamplerInner {
    handle: Mutex<Handle>,
    /// The thread that has locked the handle.
    user: Mutex<Option<ThreadId>>,
}

struct Handle(NonNull<sys::tsr_sampler>);

// SAFETY: reached under the mutex only.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: this was the last owner.
        unsafe { sys::tsr_sampler_destroy(self.0.as_ptr()) }
    }
}

/// Excludes every other use of a sampler while it lives.
pub(crate) struct Exclusive<'a> {
    handle: MutexGuard<'a, Handle>,
    user: &'a Mutex<Option<ThreadId>>,
}

impl Exclusive<'_> {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_sampler {
        self.handle.0.as_ptr()
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        set(self.user, None);
    }
}

fn set(user: &Mutex<Option<ThreadId>>, thread: Option<ThreadId>) {
    *user.lock().unwrap_or_else(PoisonError::into_inner) = thread;
}

impl SamplerInner {
    fn new(handle: NonNull<sys::tsr_sampler>) -> Self {
        SamplerInner { handle: Mutex::new(Handle(handle)), user: Mutex::default() }
    }

    /// Waits for another thread, but fails on a thread that would wait for itself: in a callback of a save or load of
    /// the sampler.
    pub(crate) fn lock(&self) -> Result<Exclusive<'_>> {
        let this = Some(thread::current().id());
        if *self.user.lock().unwrap_or_else(PoisonError::into_inner) == this {
            return Err(Error::state("the sampler cannot be used in a callback of a save or load that reads it"));
        }
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        set(&self.user, this);
        Ok(Exclusive { handle, user: &self.user })
    }
}

/// Builds a [`Sampler`]. Settings that are not set have the library's defaults.
#[must_use = "it is a builder: call build()"]
pub struct SamplerBuilder<'a> {
    comm: &'a Comm,
    length: usize,
    settings: SamplerSettings,
}

impl SamplerBuilder<'_> {
    sampler_setters!();

    /// The sampler, at the beginning of epoch 0.
    ///
    /// # Errors
    /// `InvalidArgument`: the length is 0.
    pub fn build(self) -> Result<Sampler> {
        let length = raw::int64("the length", self.length)?;
        let mut handle = ptr::null_mut();
        // SAFETY: communicator and options are borrowed for the call.
        self.settings
            .with_raw(|raw| check(unsafe { sys::tsr_sampler_create(self.comm.as_ptr(), length, raw, &mut handle) }))?;
        Ok(Sampler { inner: Arc::new(SamplerInner::new(created(handle)?)), length: self.length, last: 0 })
    }
}

impl Sampler {
    /// Starts building a sampler of `length` samples over the ranks of `comm`; finish with `build()`.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(comm: &Comm, length: usize) -> SamplerBuilder<'_> {
        SamplerBuilder { comm, length, settings: SamplerSettings::default() }
    }

    pub(crate) fn inner(&self) -> &Arc<SamplerInner> {
        &self.inner
    }

    /// This rank's next batch: the numbers of up to `size` samples. All ranks must ask for the same sizes. The next
    /// epoch starts automatically; a batch never spans two epochs, so the last one of an epoch may be shorter.
    ///
    /// # Errors
    /// `InvalidArgument`: the size is 0.
    pub fn batch(&mut self, size: usize) -> Result<Vec<usize>> {
        let size = size.min(self.length.max(1)); // no batch is larger than an epoch
        let mut indices = vec![0i64; size];
        let mut count = 0;
        let inner = self.inner.lock()?;
        // SAFETY: the handle is locked, the vector has `size` places; so in every method below.
        check(unsafe { sys::tsr_sampler_next(inner.as_ptr(), indices.as_mut_ptr(), size, &mut count) })?;
        self.last = count;
        Ok(indices.into_iter().take(count).map(|index| usize::try_from(index).unwrap_or(0)).collect())
    }

    /// Which samples of the last batch are not padding; empty before the first. Where the samples do not divide by the ranks,
    /// the last step of an epoch is filled up with samples that some rank has taken already, which metrics leave out
    /// ([`Metric::update_with`](crate::Metric::update_with)).
    ///
    /// # Errors
    /// `InvalidState`: it is called in a callback of a save or load of the sampler.
    pub fn valid(&self) -> Result<Vec<u8>> {
        let mut valid = vec![0u8; self.last];
        check(unsafe { sys::tsr_sampler_valid(self.inner.lock()?.as_ptr(), valid.as_mut_ptr(), valid.len()) })?;
        Ok(valid)
    }

    /// The epoch of the next batch, counted from 0.
    ///
    /// # Errors
    /// `InvalidState`: it is called in a callback of a save or load of the sampler.
    pub fn epoch(&self) -> Result<u64> {
        Ok(self.position()?.0)
    }

    /// How many samples of that epoch all ranks together have consumed.
    ///
    /// # Errors
    /// `InvalidState`: it is called in a callback of a save or load of the sampler.
    pub fn consumed(&self) -> Result<u64> {
        Ok(self.position()?.1)
    }

    fn position(&self) -> Result<(u64, u64)> {
        let (mut epoch, mut consumed) = (0, 0);
        check(unsafe { sys::tsr_sampler_position(self.inner.lock()?.as_ptr(), &mut epoch, &mut consumed) })?;
        Ok((u64::try_from(epoch).unwrap_or(0), u64::try_from(consumed).unwrap_or(0)))
    }

    /// Moves to the beginning of `epoch`.
    ///
    /// # Errors
    /// `InvalidArgument`: it is beyond 2^63 - 1.
    pub fn set_epoch(&mut self, epoch: u64) -> Result<()> {
        let epoch = i64::try_from(epoch)
            .map_err(|_| Error::argument(format!("the epoch is {epoch}; it must be at most {}", i64::MAX)))?;
        check(unsafe { sys::tsr_sampler_set_epoch(self.inner.lock()?.as_ptr(), epoch) })
    }
}

impl fmt::Debug for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (epoch, consumed) = self.position().unwrap_or((0, 0));
        f.debug_struct("Sampler").field("epoch", &epoch).field("consumed", &consumed).finish()
    }
}

impl fmt::Debug for SamplerBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SamplerBuilder").field("length", &self.length).finish_non_exhaustive()
    }
}
