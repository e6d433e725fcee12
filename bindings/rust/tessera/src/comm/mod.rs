//! Communicators: joining, splitting, leaving. Their collectives are in `collectives`, `nonblocking` and `device`.

mod collectives;
mod device;
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

pub(crate) use self::device::on_cpu;
pub use self::device::{AfterStream, CudaTensor, OnStream};
pub use self::options::CommOptions;
use crate::choices::Creation;
use crate::error::{check, Code, Error, Result};
use crate::launch;
use crate::raw::{self, created, path_string};
use crate::store::{Store, StoreHandle};

/// This process's (or thread's) place among the ranks of a group.
///
/// Every rank calls the same collectives in the same order. A failed collective fails the communicator: later calls
/// return [`Code::Aborted`](crate::Code::Aborted) with the first cause. All counts are in elements, not bytes.
///
/// A `Comm` may be moved to another thread but not used from two at once (`Send`, not `Sync`); the exception is its
/// [`AbortHandle`]. Dropping it is local: it aborts running operations and waits for no other rank.
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

/// For objects that borrow a communicator. It has a destructor, so that the compiler keeps the communicator from being
/// dropped or moved to another thread before; a mere `PhantomData<&Comm>` has none.
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

/// What the C object needs to be alive, and whether we own it.
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

    /// Joins the job that the environment describes: `tessera run`, torchrun, mpirun, srun or an Indexed Job of
    /// Kubernetes; or this process alone.
    ///
    /// # Errors
    /// [`Timeout`](crate::Code::Timeout): a rank did not join in time; [`PeerLost`](crate::Code::PeerLost): a rank of
    /// `tessera run` exited before it joined; [`Permission`](crate::Code::Permission): the job token;
    /// `InvalidArgument`, `Io`, `Unsupported`, `Interrupted`; those of [`load`](crate::load).
    pub fn from_env() -> Result<Self> {
        Self::from_env_with(&CommOptions::new())
    }

    /// [`Comm::from_env`] with settings.
    ///
    /// # Errors
    /// The same errors.
    pub fn from_env_with(options: &CommOptions) -> Result<Self> {
        crate::load()?;
        let mut handle = ptr::null_mut();
        options.settings.with_raw(|options| {
            // SAFETY: the options are borrowed for the call.
            check(unsafe { sys::tsr_comm_from_env(options, &mut handle) })
        })?;
        Ok(Self::from_raw(created(handle)?, Owner::Us(None)))
    }

    /// Connects `world_size` ranks through a common store; `rank` is this rank's unique number.
    ///
    /// # Errors
    /// [`Timeout`](crate::Code::Timeout): a rank did not join in time; [`Mismatch`](crate::Code::Mismatch): the ranks'
    /// settings differ; `InvalidArgument`, `Io`, `Unsupported`, `Interrupted`.
    pub fn create(store: &Store, rank: usize, world_size: usize, options: &CommOptions) -> Result<Self> {
        let (rank, world_size) = (raw::int32("the rank", rank)?, raw::int32("the world size", world_size)?);
        let mut handle = ptr::null_mut();
        options.settings.with_raw(|options| {
            // SAFETY: the store is kept by the new object; the options are borrowed for the call.
            check(unsafe { sys::tsr_comm_create(store.as_ptr(), rank, world_size, options, &mut handle) })
        })?;
        Ok(Self::from_raw(created(handle)?, Owner::Us(Some(Arc::clone(&store.0)))))
    }

    /// Splits the ranks into groups: ranks of the same `color` form one, ordered by `key`, then rank. Without a color
    /// this rank joins none. Every rank of this communicator must call it.
    ///
    /// # Errors
    /// `InvalidArgument`, `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Comm>> {
        self.creating(Creation::Comm, |reached| self.split_raw(color, key, ptr::null(), reached))
    }

    /// [`Comm::split`] with settings for the group.
    ///
    /// # Errors
    /// The same errors.
    pub fn split_with(&self, color: Option<usize>, key: usize, options: &CommOptions) -> Result<Option<Comm>> {
        self.creating(Creation::Comm, |reached| {
            options.settings.with_raw(|options| self.split_raw(color, key, options, reached))
        })
    }

    fn split_raw(
        &self,
        color: Option<usize>,
        key: usize,
        options: *const sys::tsr_comm_options,
        reached: &Cell<bool>,
    ) -> Result<Option<Comm>> {
        let color = color.map_or(Ok(-1), |color| raw::int32("the color", color))?;
        let key = raw::int32("the key", key)?;
        let mut handle = ptr::null_mut();
        reached.set(true);
        // SAFETY: the options are null or borrowed for the call.
        check(unsafe { sys::tsr_comm_split(self.as_ptr(), color, key, options, &mut handle) })?;
        Ok(NonNull::new(handle).map(|handle| Self::from_raw(handle, Owner::Us(self.store()))))
    }

    /// Tells the other ranks that this one cannot take part in a creation, in place of the creation: it fails on them too,
    /// with `code`, and the error names this rank and the reason. They would otherwise wait for this rank until their
    /// deadline. Call it for checks of your own that one rank alone may fail, and return the error that it returns. The
    /// communicator stays usable. Collective.
    ///
    /// ```
    /// # fn main() -> tessera::Result<()> {
    /// use tessera::{Code, Comm, Creation};
    /// let comm = Comm::from_env()?;
    /// let error = comm.refuse(Creation::Model, Code::NotFound, "there is no file model.bin");
    /// assert_eq!(error.code(), Code::NotFound);
    /// # Ok(()) }
    /// ```
    pub fn refuse(&self, creation: Creation, code: Code, reason: &str) -> Error {
        let text = raw::c_string("the reason", &reason.replace('\0', " ")).unwrap_or_default();
        // SAFETY: the text is borrowed for the call.
        check(unsafe { sys::tsr_comm_refuse(self.as_ptr(), creation as i32, code.as_raw(), text.as_ptr()) })
            .err()
            .unwrap_or_else(|| Error::new(code, reason))
    }

    /// The result of `arguments`; if they are refused, so is the creation on the other ranks.
    pub(crate) fn or_refuse<T>(&self, creation: Creation, arguments: impl FnOnce() -> Result<T>) -> Result<T> {
        self.creating(creation, |_| arguments())
    }

    /// The result of `create`, which sets its argument before its collective call; if it fails before that, the creation is
    /// refused on the other ranks.
    pub(crate) fn creating<T>(&self, creation: Creation, create: impl FnOnce(&Cell<bool>) -> Result<T>) -> Result<T> {
        let reached = Cell::new(false);
        create(&reached).inspect_err(|why| {
            if !reached.get() {
                drop(self.refuse(creation, why.code(), why.message()));
            }
        })
    }

    /// Continues with the surviving ranks after a failure, numbered in this communicator's order. Collective over the
    /// survivors. Ranks that died or dropped this communicator are known to be gone; the call waits for other ranks
    /// until the deadline, then continues without them. Objects made from this communicator can no longer be used:
    /// create them again and load a checkpoint, because the failed collective left its buffers incomplete.
    ///
    /// # Errors
    /// `Aborted`: the other ranks have continued without this one; `Io`: the store that the ranks use is gone, because
    /// rank 0, which served it, died; `InvalidState`, `Timeout`, `PeerLost`, `Interrupted`.
    pub fn shrink(&self) -> Result<Comm> {
        self.shrink_raw(ptr::null())
    }

    /// [`Comm::shrink`] with settings for the new communicator, whose timeout is also the deadline for ranks that do
    /// not call.
    ///
    /// # Errors
    /// The same errors.
    pub fn shrink_with(&self, options: &CommOptions) -> Result<Comm> {
        options.settings.with_raw(|options| self.shrink_raw(options))
    }

    fn shrink_raw(&self, options: *const sys::tsr_comm_options) -> Result<Comm> {
        let mut handle = ptr::null_mut();
        // SAFETY: the options are null or borrowed for the call.
        check(unsafe { sys::tsr_comm_shrink(self.as_ptr(), options, &mut handle) })?;
        Ok(Self::from_raw(created(handle)?, Owner::Us(self.store())))
    }

    /// Continues with all ranks after a failure, of which some are new processes. Collective over all ranks. Under
    /// `tessera run --on-loss replace` the launcher starts another process for a rank that was killed. That process
    /// calls [`Comm::from_env`], as any rank does, and the other ranks call this: together they make the new
    /// communicator, with the rank numbers and the world size of this one. If another rank dies meanwhile, its
    /// replacement is waited for, too. Objects made from this communicator can no longer be used, as after
    /// [`Comm::shrink`].
    ///
    /// # Errors
    /// `InvalidState`: this communicator was not made from the environment under `tessera run --on-loss replace`;
    /// `Timeout`: the ranks that the message names did not come; `PeerLost`: a rank has ended and is not replaced;
    /// `Aborted`: another process has replaced this one; `Io`: the store that the ranks use is gone; `Interrupted`.
    pub fn grow(&self) -> Result<Comm> {
        self.grow_raw(ptr::null())
    }

    /// [`Comm::grow`] with settings for the new communicator, whose timeout is also the deadline of the call.
    ///
    /// # Errors
    /// The same errors.
    pub fn grow_with(&self, options: &CommOptions) -> Result<Comm> {
        options.settings.with_raw(|options| self.grow_raw(options))
    }

    fn grow_raw(&self, options: *const sys::tsr_comm_options) -> Result<Comm> {
        let mut handle = ptr::null_mut();
        // SAFETY: the options are null or borrowed for the call.
        check(unsafe { sys::tsr_comm_grow(self.as_ptr(), options, &mut handle) })?;
        Ok(Self::from_raw(created(handle)?, Owner::Us(self.store())))
    }

    /// Waits for all ranks and all issued work. No collective may follow. An error is also reported to the launcher, as
    /// by [`record_error`](crate::record_error), because this call ends most programs.
    ///
    /// # Errors
    /// `InvalidState`, `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn finalize(&self) -> Result<()> {
        // SAFETY: the handle is alive, and used by no other thread; so in every method below.
        check(unsafe { sys::tsr_comm_finalize(self.as_ptr()) }).inspect_err(launch::tell_of)
    }

    /// A handle with which any thread can abort this communicator.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle(Arc::downgrade(&self.handle))
    }

    /// Fails every pending and later operation with [`Aborted`](crate::Code::Aborted), on this rank and its peers;
    /// `reason` is part of the error on every rank.
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

    /// Sets the deadline of operations that this rank issues from now on, counted from the start of each. Operations
    /// already issued keep theirs, so the old value can be restored at once. Each rank has its own deadline; the first
    /// one that passes fails the communicator on all ranks.
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

    /// The error that failed the communicator, detected by a call or by a peer's death; `None` if it works.
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

    /// Writes this rank's flight record, the last 1,024 operations and their times, as JSON lines, which `tessera
    /// trace` reads; an existing file is replaced as a whole. Under `tessera run --trace-dir DIR` each communicator
    /// writes its own when it fails or ends.
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

/// Aborts a [`Comm`] from any thread. Does nothing once the communicator is dropped.
#[derive(Clone)]
pub struct AbortHandle(Weak<CommHandle>);

impl AbortHandle {
    /// See [`Comm::abort`].
    ///
    /// # Errors
    /// The same errors.
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
