//! The ranks of a group and their collectives.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tessera_sys as sys;

use crate::buffer::{Buffer, OwnedSlice};
use crate::element::{Element, ReduceOp};
use crate::error::{check, Error, Result};
use crate::mesh::MeshHandle;
use crate::raw;
use crate::store::{created, Store, StoreHandle};
use crate::tensor::{flat_shape, raw_tensor};
use crate::work::{Views, Work};

/// Settings of a [`Comm`]. What is not set is the library's default.
#[derive(Clone, Debug, Default)]
pub struct CommOptions {
    timeout: Option<Duration>,
    spin_count: Option<i32>,
    backend: Option<String>,
    name: Option<String>,
}

impl CommOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The deadline of each collective.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Busy turns before a waiting rank yields its core; -1 decides by ranks and usable cores.
    #[must_use]
    pub fn spin_count(mut self, spin_count: i32) -> Self {
        self.spin_count = Some(spin_count);
        self
    }

    /// `"auto"`, `"shm"`, `"gloo"`, or a backend for each device: `"cpu:gloo,cuda:nccl"`.
    #[must_use]
    pub fn backend(mut self, backend: impl Into<String>) -> Self {
        self.backend = Some(backend.into());
        self
    }

    /// The name in messages and logs.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    fn with_raw<R>(&self, body: impl FnOnce(&sys::tsr_comm_options) -> Result<R>) -> Result<R> {
        // SAFETY: a struct of numbers and pointers, of which zero is a value.
        let mut raw: sys::tsr_comm_options = unsafe { std::mem::zeroed() };
        // SAFETY: the library is loaded by the callers; the struct is ours.
        check(unsafe { sys::tsr_comm_options_init(&mut raw, size_of::<sys::tsr_comm_options>()) })?;
        let (backend, name) = (raw::optional("the backend", &self.backend)?, raw::optional("the name", &self.name)?);
        if let Some(timeout) = self.timeout {
            raw.timeout_ms = raw::milliseconds(timeout);
        }
        if let Some(spin_count) = self.spin_count {
            raw.spin_count = spin_count;
        }
        if backend.is_some() {
            raw.backend = raw::pointer(&backend);
        }
        if name.is_some() {
            raw.name = raw::pointer(&name);
        }
        body(&raw)
    }
}

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

pub(crate) struct CommHandle {
    ptr: NonNull<sys::tsr_comm>,
    owner: Owner,
}

/// What the C object needs alive, and whether it is ours to destroy.
pub(crate) enum Owner {
    /// Ours; made on a store, or split off a communicator that was.
    Us(Option<Arc<StoreHandle>>),
    /// A mesh's.
    Mesh { _mesh: Arc<MeshHandle>, _store: Option<Arc<StoreHandle>> },
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
        }
    }

    /// Joins the job that the environment describes: `tessera run`, torchrun, mpirun or srun; alone without any of them.
    ///
    /// # Errors
    /// [`Timeout`](crate::Code::Timeout): a rank never came; [`Permission`](crate::Code::Permission): the job token;
    /// `InvalidArgument`, `Io`, `Unsupported`, `Interrupted`; those of [`load`](crate::load).
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
        options.with_raw(|options| {
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
        options.with_raw(|options| {
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
        options.with_raw(|options| self.split_raw(color, key, options))
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

    /// Waits for all ranks and all issued work; no collective may follow.
    ///
    /// # Errors
    /// `InvalidState`, `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn finalize(&self) -> Result<()> {
        // SAFETY: the handle is alive, and used by no other thread; so in every method below.
        check(unsafe { sys::tsr_comm_finalize(self.as_ptr()) })
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

    /// The transport in use: `"shm"`, `"gloo"`, or `"self"` for one rank.
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

    /// A buffer of `len` zeros in memory that peers of this host reach. Collective; the same length on every rank.
    ///
    /// # Errors
    /// `Mismatch`: lengths differ; `NoMemory`, `Timeout`, `Aborted`, `PeerLost`, `InvalidArgument`.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        Buffer::new(self, len)
    }
}

/// # Collectives
/// Each returns when the operation is done on this rank. Errors common to all: `InvalidArgument`; `InvalidState` after
/// [`Comm::finalize`]; `Mismatch`: ranks differ in operation, dtype, count or root, and the message names who differs how
/// (nothing has been overwritten then); `Timeout`: a rank never entered; `PeerLost`; `Aborted`; `Unsupported`;
/// `Interrupted`.
impl Comm {
    /// Reduces `data` over the ranks, in place. Every rank gets the same bits.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.all_reduce_many(&mut [data], op)
    }

    /// [`Comm::all_reduce`] of several slices in one operation; as many on every rank.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_reduce_many<T: Element>(&self, data: &mut [&mut [T]], op: ReduceOp) -> Result<()> {
        in_place(data, |tensors| {
            // SAFETY: the slices are borrowed mutably for the call, which returns when it is done with them.
            check(unsafe {
                let (n, op, stream, work) = (tensors.len(), op.as_raw(), ptr::null_mut(), ptr::null_mut());
                sys::tsr_comm_all_reduce(self.as_ptr(), tensors.as_ptr(), n, op, stream, work)
            })
        })
    }

    /// Reduces `input` and leaves the r-th of world-size equal parts in rank r's `output`.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let shapes = (flat_shape(input.len()), flat_shape(output.len()));
        let (input, output) = (reading(input, &shapes.0), writing(output, &shapes.1));
        // SAFETY: the slices are borrowed for the call, which returns when it is done with them; so below.
        check(unsafe {
            let (op, stream, work) = (op.as_raw(), ptr::null_mut(), ptr::null_mut());
            sys::tsr_comm_reduce_scatter(self.as_ptr(), &input, &output, op, stream, work)
        })
    }

    /// Concatenates all ranks' `input` in rank order; `output` is world-size times as long.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let shapes = (flat_shape(input.len()), flat_shape(output.len()));
        let (input, output) = (reading(input, &shapes.0), writing(output, &shapes.1));
        check(unsafe { sys::tsr_comm_all_gather(self.as_ptr(), &input, &output, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Gathers inputs of different lengths: `outputs[r]` receives rank r's `input`. One output a rank, of the same
    /// lengths on every rank.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_gather_v<T: Element>(&self, input: &[T], outputs: &mut [&mut [T]]) -> Result<()> {
        let world_size = self.world_size()?;
        if outputs.len() != world_size {
            return Err(Error::argument(format!(
                "all_gather_v needs one output a rank: {} were given for {world_size} ranks",
                outputs.len()
            )));
        }
        let shape = flat_shape(input.len());
        let input = reading(input, &shape);
        in_place(outputs, |outputs| {
            check(unsafe {
                let (stream, work) = (ptr::null_mut(), ptr::null_mut());
                sys::tsr_comm_all_gather_v(self.as_ptr(), &input, outputs.as_ptr(), stream, work)
            })
        })
    }

    /// Gives every rank the root's `data`.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.broadcast_many(&mut [data], root)
    }

    /// [`Comm::broadcast`] of several slices in one operation; as many on every rank.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn broadcast_many<T: Element>(&self, data: &mut [&mut [T]], root: usize) -> Result<()> {
        let root = raw::int32("the root", root)?;
        in_place(data, |tensors| {
            check(unsafe {
                let (n, stream, work) = (tensors.len(), ptr::null_mut(), ptr::null_mut());
                sys::tsr_comm_broadcast(self.as_ptr(), tensors.as_ptr(), n, root, stream, work)
            })
        })
    }

    /// Reduces `input`; the result is in the root's `output` alone, which only the root gives.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn reduce<T: Element>(&self, input: &[T], output: Option<&mut [T]>, op: ReduceOp, root: usize) -> Result<()> {
        let root = raw::int32("the root", root)?;
        let shapes = (flat_shape(input.len()), output_shape(&output));
        let (input, output) = (reading(input, &shapes.0), output.map(|output| writing(output, &shapes.1)));
        check(unsafe {
            let (op, stream, work) = (op.as_raw(), ptr::null_mut(), ptr::null_mut());
            sys::tsr_comm_reduce(self.as_ptr(), &input, optional(&output), op, root, stream, work)
        })
    }

    /// Concatenates all ranks' `input` in the root's `output`, world-size times as long, which only the root gives.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn gather<T: Element>(&self, input: &[T], output: Option<&mut [T]>, root: usize) -> Result<()> {
        let root = raw::int32("the root", root)?;
        let shapes = (flat_shape(input.len()), output_shape(&output));
        let (input, output) = (reading(input, &shapes.0), output.map(|output| writing(output, &shapes.1)));
        check(unsafe {
            let (stream, work) = (ptr::null_mut(), ptr::null_mut());
            sys::tsr_comm_gather(self.as_ptr(), &input, optional(&output), root, stream, work)
        })
    }

    /// Gives rank r the r-th of world-size equal parts of the root's `input`, which only the root gives.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn scatter<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result<()> {
        let root = raw::int32("the root", root)?;
        let shapes = (flat_shape(input.map_or(0, <[T]>::len)), flat_shape(output.len()));
        let (input, output) = (input.map(|input| reading(input, &shapes.0)), writing(output, &shapes.1));
        check(unsafe {
            let (stream, work) = (ptr::null_mut(), ptr::null_mut());
            sys::tsr_comm_scatter(self.as_ptr(), optional(&input), &output, root, stream, work)
        })
    }

    /// Sends the r-th of world-size equal parts of `input` to rank r; parts arrive in `output`, as long, in rank order.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let shapes = (flat_shape(input.len()), flat_shape(output.len()));
        let (input, output) = (reading(input, &shapes.0), writing(output, &shapes.1));
        check(unsafe { sys::tsr_comm_all_to_all(self.as_ptr(), &input, &output, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Sends `data` to rank `peer`, which receives it with the same tag (0 to 2^31 - 1). Not collective.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn send<T: Element>(&self, data: &[T], peer: usize, tag: usize) -> Result<()> {
        let (peer, tag) = (raw::int32("the peer", peer)?, raw::int32("the tag", tag)?);
        let shape = flat_shape(data.len());
        let tensor = reading(data, &shape);
        check(unsafe { sys::tsr_comm_send(self.as_ptr(), &tensor, peer, tag, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Receives what rank `peer` sends with the same tag, of the same dtype and length. Not collective.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn recv<T: Element>(&self, data: &mut [T], peer: usize, tag: usize) -> Result<()> {
        let (peer, tag) = (raw::int32("the peer", peer)?, raw::int32("the tag", tag)?);
        let shape = flat_shape(data.len());
        let tensor = writing(data, &shape);
        check(unsafe { sys::tsr_comm_recv(self.as_ptr(), &tensor, peer, tag, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn barrier(&self) -> Result<()> {
        check(unsafe { sys::tsr_comm_barrier(self.as_ptr(), ptr::null_mut()) })
    }
}

/// # Asynchronous operations
/// Each returns at once with a [`Work`] that owns the buffers until the operation is done; operations run in the order
/// in which they were issued. A `Vec`, a boxed slice or a [`Buffer`] will do. Errors: see [Collectives](#collectives);
/// those noticed later come from the work.
impl Comm {
    /// [`Comm::all_reduce`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn all_reduce_async<B: OwnedSlice>(&self, mut data: B, op: ReduceOp) -> Result<Work<B>> {
        let views = Views::default().of(data.as_mut_ptr(), data.len());
        // SAFETY: the work keeps data and views; the C function starts one operation on them; so below.
        unsafe {
            Work::start(data, views, |tensors, work| {
                sys::tsr_comm_all_reduce(self.as_ptr(), tensors.as_ptr(), 1, op.as_raw(), ptr::null_mut(), work)
            })
        }
    }

    /// [`Comm::broadcast`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn broadcast_async<B: OwnedSlice>(&self, mut data: B, root: usize) -> Result<Work<B>> {
        let root = raw::int32("the root", root)?;
        let views = Views::default().of(data.as_mut_ptr(), data.len());
        unsafe {
            Work::start(data, views, |tensors, work| {
                sys::tsr_comm_broadcast(self.as_ptr(), tensors.as_ptr(), 1, root, ptr::null_mut(), work)
            })
        }
    }

    /// [`Comm::reduce_scatter`], in the background; the work gives `(input, output)` back.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn reduce_scatter_async<A, B>(&self, input: A, output: B, op: ReduceOp) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.two(input, output, |input, output, work| unsafe {
            sys::tsr_comm_reduce_scatter(self.as_ptr(), input, output, op.as_raw(), ptr::null_mut(), work)
        })
    }

    /// [`Comm::all_gather`], in the background; the work gives `(input, output)` back.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn all_gather_async<A, B>(&self, input: A, output: B) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.two(input, output, |input, output, work| unsafe {
            sys::tsr_comm_all_gather(self.as_ptr(), input, output, ptr::null_mut(), work)
        })
    }

    /// [`Comm::all_to_all`], in the background; the work gives `(input, output)` back.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn all_to_all_async<A, B>(&self, input: A, output: B) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.two(input, output, |input, output, work| unsafe {
            sys::tsr_comm_all_to_all(self.as_ptr(), input, output, ptr::null_mut(), work)
        })
    }

    /// [`Comm::send`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn send_async<B: OwnedSlice>(&self, mut data: B, peer: usize, tag: usize) -> Result<Work<B>> {
        let (peer, tag) = (raw::int32("the peer", peer)?, raw::int32("the tag", tag)?);
        let views = Views::default().of(data.as_mut_ptr(), data.len());
        unsafe {
            Work::start(data, views, |tensors, work| {
                sys::tsr_comm_send(self.as_ptr(), tensors.as_ptr(), peer, tag, ptr::null_mut(), work)
            })
        }
    }

    /// [`Comm::recv`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn recv_async<B: OwnedSlice>(&self, mut data: B, peer: usize, tag: usize) -> Result<Work<B>> {
        let (peer, tag) = (raw::int32("the peer", peer)?, raw::int32("the tag", tag)?);
        let views = Views::default().of(data.as_mut_ptr(), data.len());
        unsafe {
            Work::start(data, views, |tensors, work| {
                sys::tsr_comm_recv(self.as_ptr(), tensors.as_ptr(), peer, tag, ptr::null_mut(), work)
            })
        }
    }

    /// [`Comm::barrier`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn barrier_async(&self) -> Result<Work<()>> {
        unsafe { Work::start((), Views::default(), |_, work| sys::tsr_comm_barrier(self.as_ptr(), work)) }
    }

    fn two<A, B>(
        &self,
        mut input: A,
        mut output: B,
        issue: impl FnOnce(*const sys::tsr_tensor, *const sys::tsr_tensor, *mut *mut sys::tsr_work) -> sys::tsr_status,
    ) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        let views = Views::default().of(input.as_mut_ptr(), input.len()).of(output.as_mut_ptr(), output.len());
        unsafe { Work::start((input, output), views, |tensors, work| issue(&tensors[0], &tensors[1], work)) }
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

/// C's view of a slice that it only reads.
fn reading<T: Element>(data: &[T], shape: &[i64; 1]) -> sys::tsr_tensor {
    raw_tensor(data.as_ptr().cast_mut().cast(), shape, T::DTYPE)
}

fn writing<T: Element>(data: &mut [T], shape: &[i64; 1]) -> sys::tsr_tensor {
    raw_tensor(data.as_mut_ptr().cast(), shape, T::DTYPE)
}

fn output_shape<T>(output: &Option<&mut [T]>) -> [i64; 1] {
    flat_shape(output.as_ref().map_or(0, |output| output.len()))
}

fn optional(tensor: &Option<sys::tsr_tensor>) -> *const sys::tsr_tensor {
    tensor.as_ref().map_or(ptr::null(), |tensor| tensor)
}

fn in_place<T: Element, R>(data: &mut [&mut [T]], body: impl FnOnce(&[sys::tsr_tensor]) -> R) -> R {
    if let [data] = data {
        let shape = flat_shape(data.len());
        return body(&[writing(data, &shape)]); // the common case needs no allocation
    }
    let shapes: Vec<_> = data.iter().map(|data| flat_shape(data.len())).collect();
    let tensors: Vec<_> = data.iter_mut().zip(&shapes).map(|(data, shape)| writing(data, shape)).collect();
    body(&tensors)
}
