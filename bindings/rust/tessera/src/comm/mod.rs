//! The ranks of a group: joining, dividing, leaving. Their collectives are in `collectives` and `nonblocking`.

mod collectives;
mod nonblocking;
mod options;

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tessera_sys as sys;

pub use self::options::CommOptions;
use crate::error::{check, Error, Result};
use crate::launch;
use crate::raw::{self, created, path_string};
use crate::store::{Store, StoreHandle};

/// This process's (or thread's) place among the ranks of a group.
///
/// Every rank calls the same collectives in the same order. A collective that fails poisons the communicator: later calls
/// return [`Code::Aborted`](crate::Code::Aborted) with the first cause. Elements, not bytes, are counted everywhere.
///
/// A `Comm` may be moved to another thread but not used from two at once (`Send`, not `Sync`); the exception is its
/// [`AbortHandle`]. Dropping it is local: it aborts what still runs and waits for nobody.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{Comm, ReduceOp};
/// let comm = Comm::from_env()?; // one rank, unless a launcher says otherwise
/// let mut values = [comm.rank()? as f32 + 1.0; 4];
/// comm.all_reduce(&mut values, ReduceOp::Sum)?;
/// let n = comm.world_size()? as f32;
/// assert_eq!(values, [n * (n + 1.0) / 2.0; 4]);
/// comm.finalize()
/// # }
/// ```
pub struct Comm {
    handle: Arc<CommHandle>,
    _not_sync: PhantomData<Cell<()>>,
}

/// In what borrows a communicator. It has a destructor, so that the compiler does not let the communicator go, or move to
/// another thread, before; of a mere `PhantomData<&Comm>` it thinks that nothing happens to it at the end.
pub(crate) struct Borrowed<'c>(PhantomData<&'c Comm>);

impl Borrowed<'_> {
    pub(crate) fn new() -> Self {
        Borrowed(PhantomData)
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {}
}

pub(crate) struct CommHandle {
    ptr: NonNull<sys::tsr_comm>,
    owner: Owner,
}

/// What the C object needs alive, and whether it is ours to destroy.
pub(crate) enum Owner {
    /// Ours; made on a store, or split off a communicator that was.
    Us(Option<Arc<StoreHandle>>),
    /// A mesh's.
    Mesh { _mesh: Arc<dyn Any + Send + Sync>, _store: Option<Arc<StoreHandle>> },
    /// The library's, lent to a hook for its call.
    Library,
}

// SAFETY: the handle is reached through `Comm`, which is not Sync, and `AbortHandle`, whose one call is thread-safe. The
// last owner destroys it, on whatever thread that is.
unsafe impl Send for CommHandle {}
unsafe impl Sync for CommHandle {}

impl Drop for CommHandle {
    fn drop(&mut self) {
        if let Owner::Us(_) = self.owner {
            // SAFETY: this was the last owner; the store is dropped after this.
            unsafe { sys::tsr_comm_destroy(self.ptr.as_ptr()) }
        }
    }
}

impl Comm {
    pub(crate) fn from_raw(ptr: NonNull<sys::tsr_comm>, owner: Owner) -> Self {
        Comm { handle: Arc::new(CommHandle { ptr, owner }), _not_sync: PhantomData }
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_comm {
        self.handle.ptr.as_ptr()
    }

    /// The store that this communicator, and all made from it, need.
    pub(crate) fn store(&self) -> Option<Arc<StoreHandle>> {
        match &self.handle.owner {
            Owner::Us(store) | Owner::Mesh { _store: store, .. } => store.clone(),
            Owner::Library => None,
        }
    }

    /// Joins the job that the environment describes: `tessera run`, torchrun, mpirun or srun; alone without any of them.
    ///
    /// # Errors
    /// [`Timeout`](crate::Code::Timeout): a rank never came; [`PeerLost`](crate::Code::PeerLost): a rank of `tessera run`
    /// ended without coming; [`Permission`](crate::Code::Permission): the job token; `InvalidArgument`, `Io`, `Unsupported`, `Interrupted`; those of [`load`](crate::load).
    pub fn from_env() -> Result<Self> {
        Self::from_env_with(&CommOptions::new())
    }

    /// [`Comm::from_env`] with settings.
    ///
    /// # Errors
    /// As there.
    pub fn from_env_with(options: &CommOptions) -> Result<Self> {
        crate::load()?;
        let mut handle = ptr::null_mut();
        options.settings.with_raw(|options| {
            // SAFETY: the options are borrowed for the call.
            check(unsafe { sys::tsr_comm_from_env(options, &mut handle) })
        })?;
        Ok(Self::from_raw(created(handle)?, Owner::Us(None)))
    }

    /// Joins `world_size` ranks that use the same store, as `rank`, which nobody else is.
    ///
    /// # Errors
    /// [`Timeout`](crate::Code::Timeout): a rank never came; [`Mismatch`](crate::Code::Mismatch): the ranks' settings
    /// differ; `InvalidArgument`, `Io`, `Unsupported`, `Interrupted`.
    pub fn create(store: &Store, rank: usize, world_size: usize, options: &CommOptions) -> Result<Self> {
        let (rank, world_size) = (raw::int32("the rank", rank)?, raw::int32("the world size", world_size)?);
        let mut handle = ptr::null_mut();
        options.settings.with_raw(|options| {
            // SAFETY: the store is kept by the new object; the options are borrowed for the call.
            check(unsafe { sys::tsr_comm_create(store.as_ptr(), rank, world_size, options, &mut handle) })
        })?;
        Ok(Self::from_raw(created(handle)?, Owner::Us(Some(Arc::clone(&store.0)))))
    }

    /// Divides the ranks into groups: those of one `color` form one, ordered by `key`, then by rank. Without a color this
    /// rank joins none. Every rank of this communicator must call it.
    ///
    /// # Errors
    /// `InvalidArgument`, `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Comm>> {
        self.split_raw(color, key, ptr::null())
    }

    /// [`Comm::split`] with settings of the group's own.
    ///
    /// # Errors
    /// As there.
    pub fn split_with(&self, color: Option<usize>, key: usize, options: &CommOptions) -> Result<Option<Comm>> {
        options.settings.with_raw(|options| self.split_raw(color, key, options))
    }

    fn split_raw(
        &self,
        color: Option<usize>,
        key: usize,
        options: *const sys::tsr_comm_options,
    ) -> Result<Option<Comm>> {
        let color = color.map_or(Ok(-1), |color| raw::int32("the color", color))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the options are null or borrowed for the call.
        check(unsafe { sys::tsr_comm_split(self.as_ptr(), color, raw::int32("the key", key)?, options, &mut handle) })?;
        Ok(NonNull::new(handle).map(|handle| Self::from_raw(handle, Owner::Us(self.store()))))
    }

    /// Goes on with the ranks that are left after a failure, numbered in this communicator's order. Collective of those. Ranks
    /// that died, or dropped this communicator, are known to be gone; for others it waits until the deadline, then goes on
    /// without them. All that was made from this communicator is out of use: make it anew, and load a checkpoint, since a
    /// collective that failed left its buffers half done.
    ///
    /// # Errors
    /// `Aborted`: the others have gone on without this rank; `Io`: the store at which the ranks met is gone, as with a rank 0
    /// that served it; `InvalidState`, `Timeout`, `PeerLost`, `Interrupted`.
    pub fn shrink(&self) -> Result<Comm> {
        self.shrink_raw(ptr::null())
    }

    /// [`Comm::shrink`] with settings of the new communicator, whose timeout is the deadline for ranks that do not come.
    ///
    /// # Errors
    /// As there.
    pub fn shrink_with(&self, options: &CommOptions) -> Result<Comm> {
        options.settings.with_raw(|options| self.shrink_raw(options))
    }

    fn shrink_raw(&self, options: *const sys::tsr_comm_options) -> Result<Comm> {
        let mut handle = ptr::null_mut();
        // SAFETY: the options are null or borrowed for the call.
        check(unsafe { sys::tsr_comm_shrink(self.as_ptr(), options, &mut handle) })?;
        Ok(Self::from_raw(created(handle)?, Owner::Us(self.store())))
    }

    /// Waits for all ranks and all issued work; no collective may follow. If that fails the launcher is told, since it is
    /// the end of most programs, as by [`record_error`](crate::record_error).
    ///
    /// # Errors
    /// `InvalidState`, `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn finalize(&self) -> Result<()> {
        // SAFETY: the handle is alive, and used by no other thread; so in every method below.
        check(unsafe { sys::tsr_comm_finalize(self.as_ptr()) }).inspect_err(launch::tell_of)
    }

    /// A handle by which any thread can abort this communicator.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle(Arc::downgrade(&self.handle))
    }

    /// Fails every waiting and later operation with [`Aborted`](crate::Code::Aborted), here and at the peers, who are
    /// told `reason`.
    ///
    /// # Errors
    /// `InvalidArgument`: the reason contains a zero byte.
    pub fn abort(&self, reason: &str) -> Result<()> {
        abort(&self.handle, reason)
    }

    /// This rank's number, from 0.
    ///
    /// # Errors
    /// None in practice.
    pub fn rank(&self) -> Result<usize> {
        let mut rank = 0;
        check(unsafe { sys::tsr_comm_rank(self.as_ptr(), &mut rank) })?;
        Ok(usize::try_from(rank).unwrap_or(0))
    }

    /// The number of ranks.
    ///
    /// # Errors
    /// None in practice.
    pub fn world_size(&self) -> Result<usize> {
        let mut size = 0;
        check(unsafe { sys::tsr_comm_world_size(self.as_ptr(), &mut size) })?;
        Ok(usize::try_from(size).unwrap_or(1))
    }

    /// The transport in use: `"shm"`, `"gloo"`, `"hierarchical"` on several hosts, or `"self"` for one rank.
    ///
    /// # Errors
    /// None in practice.
    pub fn transport(&self) -> Result<String> {
        let mut name = ptr::null();
        // SAFETY: the name lives as long as the communicator, and is copied.
        unsafe {
            check(sys::tsr_comm_transport(self.as_ptr(), &mut name))?;
            Ok(raw::text(name))
        }
    }

    /// Sets the deadline of the operations that this rank issues from here on, counted from when each starts; those that
    /// were issued keep theirs, so that it may be set back at once. Each rank has its own; the first that passes fails the
    /// communicator on all.
    ///
    /// # Errors
    /// `InvalidArgument`: it is zero.
    pub fn set_timeout(&self, timeout: Duration) -> Result<()> {
        // SAFETY: the handle is valid.
        check(unsafe { sys::tsr_comm_set_timeout(self.as_ptr(), raw::milliseconds(timeout)) })
    }

    /// The deadline of an operation issued now.
    ///
    /// # Errors
    /// None in practice.
    pub fn timeout(&self) -> Result<Duration> {
        let mut ms = 0;
        // SAFETY: the handle is valid.
        check(unsafe { sys::tsr_comm_timeout(self.as_ptr(), &mut ms) })?;
        Ok(Duration::from_millis(u64::try_from(ms).unwrap_or(0)))
    }

    /// The error that failed the communicator, noticed by a call or by a peer's death; `None` while it is well.
    ///
    /// # Errors
    /// None in practice.
    pub fn error(&self) -> Result<Option<Error>> {
        let mut error = ptr::null_mut();
        // SAFETY: the error is ours to free.
        unsafe {
            check(sys::tsr_comm_error(self.as_ptr(), &mut error))?;
            Ok(Error::from_detached(error))
        }
    }

    /// Writes this rank's flight record, the last 1,024 operations and their times, as JSON lines, which `tessera trace`
    /// reads; a file that is there is replaced whole. Under `tessera run --trace-dir DIR` each communicator writes its
    /// own when it fails, or else at its end.
    ///
    /// # Errors
    /// `Io`, `Permission`: the file cannot be written; `InvalidArgument`.
    pub fn write_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path_string(path.as_ref())?;
        // SAFETY: the path is borrowed for the call.
        check(unsafe { sys::tsr_comm_write_trace(self.as_ptr(), path.as_ptr()) })
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, size) = (self.rank().unwrap_or(0), self.world_size().unwrap_or(0));
        f.debug_struct("Comm").field("rank", &rank).field("world_size", &size).finish_non_exhaustive()
    }
}

/// Aborts a [`Comm`] from any thread; after the communicator is gone it does nothing.
#[derive(Clone)]
pub struct AbortHandle(Weak<CommHandle>);

impl AbortHandle {
    /// See [`Comm::abort`].
    ///
    /// # Errors
    /// As there.
    pub fn abort(&self, reason: &str) -> Result<()> {
        self.0.upgrade().map_or(Ok(()), |handle| abort(&handle, reason))
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AbortHandle")
    }
}

fn abort(handle: &CommHandle, reason: &str) -> Result<()> {
    let reason = raw::c_string("the reason", reason)?;
    // SAFETY: the handle is alive, and the function is thread-safe.
    check(unsafe { sys::tsr_comm_abort(handle.ptr.as_ptr(), reason.as_ptr()) })
}
