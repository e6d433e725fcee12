//! Data-parallel training.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tessera_sys as sys;

use crate::callback::Failure;
use crate::choices::{Creation, DdpHook, DdpJoin};
use crate::comm::{on_cpu, Borrowed, Comm, CudaTensor, Owner};
use crate::element::{DType, Element, ReduceOp};
use crate::error::{check, Code, Error, Result};
use crate::params::{group_accessors, GradientOf, Group, Params, RawParams};
use crate::raw::{self, created};
use crate::settings::{ddp_setters, DdpSettings};
use crate::tensor::{slice, slice_mut, Held, Tensor, Use, View, ViewMut};
use crate::tp::{Handle, TensorParallel};

/// A bucket in the last reduced step. Times are since the step's first `ready` on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketStats {
    /// Size in bytes, including padding.
    pub size_bytes: usize,
    /// The number of its parameters.
    pub params: usize,
    /// When its last gradient was ready.
    pub ready: Duration,
    /// When its reduction began.
    pub start: Duration,
    /// When its reduction was done.
    pub end: Duration,
    /// Time that [`Ddp::wait`] spent waiting for this bucket, which backward did not hide.
    pub exposed: Duration,
}

/// A bucket whose gradients are all ready, for a hook.
pub struct Bucket<'a> {
    index: usize,
    params: &'a [usize],
    grads: &'a [sys::tsr_tensor],
    comm: Comm,
    stream: *mut c_void,
}

impl Bucket<'_> {
    /// The number of the bucket, counted from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The indices of its parameters.
    pub fn params(&self) -> &[usize] {
        self.params
    }

    /// The gradients of all of them, to be changed in place.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`]: they are not `T`.
    pub fn grads_mut<T: Element>(&mut self) -> Result<Vec<&mut [T]>> {
        let slice_of = |grad: &sys::tsr_tensor| {
            if DType::from_raw(grad.dtype) != Some(T::DTYPE) {
                return Err(Error::argument(format!("the bucket's gradients are not {}", T::DTYPE)));
            }
            if grad.device_type != sys::TSR_DEVICE_CPU {
                return Err(Error::argument("the bucket's gradients are on a device: use cuda_grads"));
            }
            // SAFETY: the shape has so many sizes.
            let shape = unsafe { slice(grad.shape, usize::try_from(grad.ndim).unwrap_or(0)) };
            let len = shape.iter().map(|size| usize::try_from(*size).unwrap_or(0)).product();
            // SAFETY: the library lends these gradients, which nobody else sees until the step is waited for, to the hook
            // for its call; they lie apart; `T` is their type.
            Ok(unsafe { slice_mut(grad.data.cast::<T>(), len) })
        };
        self.grads.iter().map(slice_of).collect()
    }

    /// The gradients of all of them where they are on a device, on whose [`stream`](Self::stream) they are changed in place.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`]: they are on the CPU.
    pub fn cuda_grads(&self) -> Result<Vec<CudaTensor>> {
        // SAFETY: the library lends these gradients for the call.
        let tensor = |grad| unsafe { Tensor::borrowed(grad) }.map(|tensor| tensor.cuda());
        let found: Option<Vec<_>> = self.grads.iter().map(tensor).collect::<Result<_>>()?;
        found.ok_or_else(|| Error::argument("the bucket's gradients are on the CPU: use grads_mut"))
    }

    /// Of gradients on a device: the CUDA stream on which they are written and must be reduced, with
    /// [`Comm::on_stream`] and kernels on that stream. Null on the CPU.
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }

    /// The model's ranks. Synchronous collectives run at once, asynchronous ones fail with
    /// [`Code::InvalidState`].
    pub fn comm(&self) -> &Comm {
        &self.comm
    }
}

impl fmt::Debug for Bucket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket").field("index", &self.index).field("params", &self.params).finish_non_exhaustive()
    }
}

/// The first failure of a hook, for the thread that waits for the step.
#[derive(Default)]
struct Failures(Mutex<Option<Failure>>);

impl Failures {
    fn lock(&self) -> MutexGuard<'_, Option<Failure>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn keep(&self, failure: Failure) {
        let second = match &mut *self.lock() {
            Some(_) => Some(failure),
            none => {
                *none = Some(failure);
                None
            }
        };
        if let Some(Failure::Panic(payload)) = second {
            raw::discard(payload);
        }
    }
}

impl Drop for Failures {
    fn drop(&mut self) {
        if let Some(Failure::Panic(payload)) = self.lock().take() {
            raw::discard(payload);
        }
    }
}

/// What a hook returns: its own error, or this crate's.
type HookResult = std::result::Result<(), Box<dyn std::error::Error + Send + Sync>>;
type HookFn = Box<dyn FnMut(&mut Bucket<'_>) -> HookResult + Send>;

/// What C keeps of a hook. The library calls it from one thread at a time.
struct HookData {
    hook: Mutex<HookFn>,
    failures: Arc<Failures>,
}

unsafe extern "C" fn on_bucket(bucket: *const sys::tsr_ddp_bucket, user_data: *mut c_void) -> i32 {
    // SAFETY: the data of `set_hook`, which lives until `release_hook`; the bucket is lent for the call.
    let (data, bucket) = unsafe { (&*user_data.cast_const().cast::<HookData>(), &*bucket) };
    let call = || {
        let comm = NonNull::new(bucket.comm).ok_or("a bucket without a communicator")?;
        let mut view = Bucket {
            index: bucket.bucket,
            // SAFETY: n each, lent for the call.
            params: unsafe { slice(bucket.params, bucket.n) },
            grads: unsafe { slice(bucket.grads, bucket.n) },
            comm: Comm::from_raw(comm, Owner::Library),
            stream: bucket.stream,
        };
        let mut hook = data.hook.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        hook(&mut view)
    };
    match panic::catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => data.failures.keep(Failure::Error(error)),
        Err(payload) => data.failures.keep(Failure::Panic(payload)),
    }
    1
}

unsafe extern "C" fn release_hook(user_data: *mut c_void) {
    // SAFETY: the box of `set_hook`, given back once.
    let data = unsafe { Box::from_raw(user_data.cast::<HookData>()) };
    raw::contained(|| drop(data));
}

/// Settings of a [`Ddp`]. Settings that are not set have the library's defaults.
#[derive(Clone, Debug, Default)]
pub struct DdpOptions {
    settings: DdpSettings,
}

impl DdpOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    ddp_setters!();
}

/// A model for data-parallel training: every rank holds the same parameters and computes gradients from its own
/// samples.
///
/// It owns the parameters. The trainer writes each gradient into [`grad_mut`](Ddp::grad_mut) and calls
/// [`ready`](Ddp::ready), in any order, while backward runs; full buckets of gradients are averaged over the ranks in
/// the background. [`wait`](Ddp::wait) ends backward: every gradient is then the average on every rank.
///
/// A gradient that is `ready` belongs to the library until `wait` and cannot be viewed. While views are alive, `ready`
/// (of that gradient), an optimizer's step and a load fail with [`Code::InvalidState`](crate::Code::InvalidState); drop
/// them at the end of a block.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, AdamW, Comm, Ddp};
/// let comm = Comm::from_env()?;
/// let mut ddp = Ddp::new(&comm, params!["w" => (vec![1.0f32; 6], [2, 3]), "b" => (vec![0.0f32; 2], [2])])?;
/// let mut opt = AdamW::new(&mut ddp).lr(1e-3).build()?;
/// for _ in 0..3 {
///     for i in 0..ddp.len() {
///         ddp.grad_mut(i)?.fill(1.0); // backward
///         ddp.ready(i)?;
///     }
///     ddp.wait()?;
///     opt.step()?;
/// }
/// assert!(ddp.param(0)?[0] < 1.0);
/// # Ok(()) }
/// ```
pub struct Ddp<'c> {
    inner: Rc<Inner>,
    _comm: Borrowed<'c>,
}

/// Shared with the optimizers and states whose C side points at it.
#[derive(Debug)]
pub struct Inner {
    handle: NonNull<sys::tsr_ddp>,
    /// Dropped after the handle; the gradients point into the handle's buckets.
    pub(crate) group: Group,
    buffers: RefCell<Vec<(String, Tensor)>>, // dropped after the handle, too
    /// Whether `wait` writes to gradients that were not ready.
    writes_unready: bool,
    /// Whether an optimizer updates each parameter as soon as its gradient was ready.
    pub(crate) steps: Cell<bool>,
    failures: Arc<Failures>,
    _tp: Option<Arc<Handle>>, // dropped after the handle
}

impl fmt::Debug for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failures").finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: this was the last owner: optimizers and states that used it are gone.
        unsafe { sys::tsr_ddp_destroy(self.handle.as_ptr()) }
    }
}

impl Inner {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_ddp {
        self.handle.as_ptr()
    }
}

impl<'c> Ddp<'c> {
    /// Registers the parameters, checks that all ranks registered the same ones, and gives every rank the values of rank
    /// 0. Collective.
    ///
    /// # Errors
    /// `Mismatch`: the ranks' parameters differ, and the message names the first difference; `InvalidArgument`: a
    /// length does not fit its shape, a dtype is not floating-point, a name occurs twice; `Timeout`, `Aborted`,
    /// `PeerLost`, `NoMemory`.
    pub fn new(comm: &'c Comm, params: Params) -> Result<Self> {
        Self::with_options(comm, params, &DdpOptions::new())
    }

    /// [`Ddp::new`] with settings.
    ///
    /// # Errors
    /// The same errors.
    pub fn with_options(comm: &'c Comm, params: Params, options: &DdpOptions) -> Result<Self> {
        Self::create(comm, params, options, None)
    }

    /// Registers the slices of a tensor-parallel model. `comm` has the ranks with the same slices and other data, such as
    /// a mesh's "dp". Optimizers, norms and states are then those of the full model, and
    /// [`sum_grads`](TensorParallel::sum_grads) is not needed. Parameters have the model's numbers; the new object keeps
    /// the slices. Collective.
    ///
    /// ```
    /// # fn main() -> tessera::Result<()> {
    /// use tessera::{params, Comm, Ddp, DdpOptions, Mesh, Style, TensorParallel};
    /// let comm = Comm::from_env()?;
    /// let mesh = Mesh::new(&comm, &[("dp", comm.world_size()?), ("tp", 1)])?;
    /// let params = params!["fc1.weight" => (vec![0.5f32; 12], [4, 3])];
    /// let tp = TensorParallel::builder(&mesh, params).dim("tp").plan([("fc1", Style::Column)]).build()?;
    /// let ddp = Ddp::over_slices(mesh.comm("dp")?, &tp, &DdpOptions::new())?;
    /// assert_eq!(ddp.name(0), tp.name(0));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Ddp::new`]; `InvalidArgument`: the ranks of `comm` do not have the same slices; `Unsupported`: with
    /// [`share_params`](DdpOptions::share_params).
    pub fn over_slices(comm: &'c Comm, tp: &TensorParallel<'c>, options: &DdpOptions) -> Result<Self> {
        Self::create(comm, tp.slices(), options, Some(tp))
    }

    fn create(comm: &'c Comm, params: Params, options: &DdpOptions, tp: Option<&TensorParallel<'c>>) -> Result<Self> {
        let params = comm.or_refuse(Creation::Model, || params.into_items())?;
        // The library writes rank 0's values and then reads at every step: nobody may hold a view now.
        let held = comm.or_refuse(Creation::Model, || {
            Held::new(params.iter().map(|(name, tensor)| (name, tensor)), Use::Writes)
        })?;
        let raw_params = comm.or_refuse(Creation::Model, || RawParams::new(&params))?;
        let mut handle = ptr::null_mut();
        let raw = comm.creating(Creation::Model, |reached| {
            options.settings.with_raw(|raw| {
                raw::set(&mut raw.tp, tp.map(|tp| tp.handle().as_ptr()));
                let (comm, params, n) = (comm.as_ptr(), raw_params.as_ptr(), params.len());
                reached.set(true);
                // SAFETY: the new object keeps the tensors and the tensor-parallel model, and borrows the communicators,
                // for as long as C does.
                check(unsafe { sys::tsr_ddp_create(comm, params, n, raw, &mut handle) })?;
                Ok(*raw)
            })
        })?;
        drop(held);
        let mut inner = Inner {
            handle: created(handle)?,
            group: Group { params, grads: Vec::new() },
            buffers: RefCell::default(),
            writes_unready: raw.find_unused != 0 || raw.static_graph != 0,
            steps: Cell::new(raw.share_params != 0),
            failures: Arc::default(),
            _tp: tp.map(|tp| Arc::clone(tp.handle())),
        };
        let mut count = 0;
        // SAFETY: the handle is alive.
        check(unsafe { sys::tsr_ddp_param_count(inner.as_ptr(), &mut count) })?;
        if count != inner.group.params.len() {
            return Err(Error::state(format!(
                "{} parameters were registered, but the library has {count}",
                inner.group.params.len()
            )));
        }
        for index in 0..count {
            // SAFETY: plain structs of which zero is a value; the views live as long as the handle, whose only owner
            // also owns the tensors made of them.
            unsafe {
                let mut param: sys::tsr_param = std::mem::zeroed();
                check(sys::tsr_ddp_param(inner.as_ptr(), index, &mut param))?;
                inner.group.params[index].0 = raw::text(param.name); // "module." is stripped
                if raw.share_params != 0 {
                    // Whose registered memory is freed here: the library has its own.
                    inner.group.params[index].1 = Tensor::shared_with_ranks(&param.tensor)?;
                }
                let mut grad: sys::tsr_tensor = std::mem::zeroed();
                check(sys::tsr_ddp_grad(inner.as_ptr(), index, &mut grad))?;
                inner.group.grads.push(Tensor::borrowed(&grad)?);
            }
        }
        Ok(Ddp { inner: Rc::new(inner), _comm: Borrowed::new() })
    }

    pub(crate) fn inner(&self) -> &Rc<Inner> {
        &self.inner
    }

    fn group(&self) -> &Group {
        &self.inner.group
    }

    group_accessors!();

    /// Marks gradient `index` as ready, in any order, each once per step. A full bucket is reduced in the background.
    ///
    /// # Errors
    /// `InvalidState`: it was marked twice, or a view of the gradient is alive; `InvalidArgument`: the parameter does
    /// not exist; `Aborted`.
    pub fn ready(&self, index: usize) -> Result<()> {
        let lent = self.lend([index].into_iter())?;
        // SAFETY: the handle is alive and used by this thread alone; so in every method below. The gradient is lent.
        check(unsafe { sys::tsr_ddp_ready(self.inner.as_ptr(), index) }).map_err(|error| self.refused(error, lent))
    }

    /// Marks all remaining gradients as ready.
    ///
    /// # Errors
    /// `InvalidState`: a view of one of them is alive, or it was already called in this step; `Aborted`.
    pub fn ready_all(&self) -> Result<()> {
        let lent = self.lend(0..self.len())?;
        check(unsafe { sys::tsr_ddp_ready_all(self.inner.as_ptr()) }).map_err(|error| self.refused(error, lent))
    }

    /// The library has not taken what was lent for this call if the state forbids it.
    fn refused(&self, error: Error, lent: Vec<usize>) -> Error {
        if error.code() == Code::InvalidState {
            self.take_back(lent.into_iter());
        }
        error
    }

    /// Lends gradients, and parameters that are updated in backward, to the library until `wait`: all or none. Returns
    /// which gradients were not lent before.
    fn lend(&self, which: impl Iterator<Item = usize>) -> Result<Vec<usize>> {
        let group = self.group();
        let mut lent = Vec::new();
        for index in which {
            let grad = group.grad(index)?;
            if grad.is_lent() {
                continue;
            }
            grad.check_writable(&GradientOf(group.name(index)))?;
            if self.inner.steps.get() && !group.param(index)?.is_lent() {
                group.param(index)?.check_writable(&group.name(index))?;
            }
            lent.push(index);
        }
        for &index in &lent {
            group.grad(index)?.lend(&GradientOf(group.name(index)))?;
            let param = group.param(index)?;
            if self.inner.steps.get() && !param.is_lent() {
                param.lend(&group.name(index))?; // one tensor may be two parameters
            }
        }
        Ok(lent)
    }

    fn take_back(&self, which: impl Iterator<Item = usize>) {
        for index in which {
            self.group().grads[index].take_back();
            if self.inner.steps.get() {
                self.group().params[index].1.take_back();
            }
        }
    }

    /// Ends the backward pass: returns when every gradient is the average (or sum) over the ranks. Collective.
    ///
    /// # Errors
    /// `InvalidState`: some gradients were never marked ready; the message names them. Mark them and wait again.
    /// `Timeout`, `Aborted`, `PeerLost`, `Mismatch`: the gradients stay inaccessible. `Interrupted`: call it again. The
    /// error of a hook.
    ///
    /// # Panics
    /// If a hook has panicked.
    pub fn wait(&mut self) -> Result<()> {
        let everything = self.inner.writes_unready || self.inner.steps.get();
        let lent = if everything { self.lend(0..self.len())? } else { Vec::new() };
        match check(unsafe { sys::tsr_ddp_wait(self.inner.as_ptr()) }) {
            Ok(()) => {
                self.take_back(0..self.len());
                Ok(())
            }
            Err(error) => {
                let error = self.refused(error, lent); // nothing was begun
                Err(self.hook_failure_or(error))
            }
        }
    }

    fn hook_failure_or(&self, error: Error) -> Error {
        if error.code() != Code::User {
            return error;
        }
        let failure = self.inner.failures.lock().take();
        match failure {
            Some(Failure::Panic(payload)) => panic::resume_unwind(payload),
            Some(Failure::Error(own)) => match own.downcast::<Error>() {
                Ok(own) => *own,
                Err(own) => Error::new(Code::User, format!("{}: {own}", error.message())),
            },
            None => error,
        }
    }

    /// The gradient of parameter `index` where it is on a device.
    ///
    /// # Errors
    /// `InvalidArgument`: there is no such parameter, or it is on the CPU.
    pub fn cuda_grad(&self, index: usize) -> Result<CudaTensor> {
        let grad = self.group().grad(index)?.cuda();
        grad.ok_or_else(|| on_cpu(&GradientOf(self.group().name(index)), "grad_mut"))
    }

    /// Names the CUDA stream on which the trainer writes gradients and uses the reduced ones. For parameters on a device
    /// ([`CudaTensor`]s) everything is in its order: a gradient that is marked ready is what this stream has written by
    /// then, and what it gets after [`wait`](Self::wait) sees the reduced gradients. No call of a step waits for the
    /// device. A new stream continues after what the model did on the previous one.
    ///
    /// # Errors
    /// `InvalidArgument`: the stream is of another device, or the parameters are on the CPU; `InvalidState`: in the
    /// middle of a step.
    ///
    /// # Safety
    /// `stream` is a CUDA stream (`cudaStream_t`), or null for the default one, as at first. It exists until another one is
    /// set or the model and its optimizers are dropped.
    pub unsafe fn set_stream(&mut self, stream: *mut c_void) -> Result<()> {
        check(unsafe { sys::tsr_ddp_set_stream(self.inner.as_ptr(), stream) })
    }

    /// Sets whether the following steps reduce. If not, `ready` and `wait` reduce nothing, and the trainer adds to the
    /// gradients in the views. The first step with synchronisation reduces the sums; a parameter that had a gradient in
    /// any of these steps counts as used. The same on every rank.
    ///
    /// # Errors
    /// `InvalidState`: in the middle of a step.
    pub fn set_sync(&mut self, sync: bool) -> Result<()> {
        check(unsafe { sys::tsr_ddp_set_sync(self.inner.as_ptr(), i32::from(sync)) })
    }

    /// Whether any rank used parameter `index` in the last reduced step. If none did, its gradient was kept.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist; `InvalidState`: in the middle of a step.
    pub fn used(&self, index: usize) -> Result<bool> {
        let mut used = 0;
        check(unsafe { sys::tsr_ddp_used(self.inner.as_ptr(), index, &mut used) })?;
        Ok(used != 0)
    }

    /// Statistics of each bucket in the last reduced step, in the order of reduction. Times are 0 before the first step
    /// and after a step that rebuilt the buckets.
    ///
    /// # Errors
    /// None in practice.
    pub fn stats(&self) -> Result<Vec<BucketStats>> {
        let mut count = 0;
        check(unsafe { sys::tsr_ddp_bucket_count(self.inner.as_ptr(), &mut count) })?;
        let since = |nanos: i64| Duration::from_nanos(u64::try_from(nanos).unwrap_or(0));
        (0..count)
            .map(|bucket| {
                // SAFETY: a plain struct of which zero is a value.
                let mut raw: sys::tsr_bucket_stats = unsafe { std::mem::zeroed() };
                raw.struct_size = size_of::<sys::tsr_bucket_stats>();
                check(unsafe { sys::tsr_ddp_stats(self.inner.as_ptr(), bucket, &mut raw) })?;
                Ok(BucketStats {
                    size_bytes: raw.size_bytes,
                    params: raw.params,
                    ready: since(raw.ready_ns),
                    start: since(raw.start_ns),
                    end: since(raw.end_ns),
                    exposed: since(raw.exposed_ns),
                })
            })
            .collect()
    }

    /// Lets `hook` reduce the buckets of the following steps. It writes the final reduced gradients in place, with
    /// collectives that are the same on every rank, and does its own averaging. It runs on a thread of the library, one
    /// bucket after another; on a rank that has joined, with zero gradients. Its error or panic fails the step on every
    /// rank, and is returned or resumed on this one.
    ///
    /// # Errors
    /// `InvalidState`: in the middle of a step.
    pub fn set_hook<H>(&mut self, hook: H) -> Result<()>
    where
        H: FnMut(&mut Bucket<'_>) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    {
        let data = Box::new(HookData { hook: Mutex::new(Box::new(hook)), failures: Arc::clone(&self.inner.failures) });
        let user_data = Box::into_raw(data).cast();
        // SAFETY: the library owns the data until it calls `release_hook`, if it takes it.
        let taken = check(unsafe {
            sys::tsr_ddp_set_hook(self.inner.as_ptr(), Some(on_bucket), user_data, Some(release_hook))
        });
        if taken.is_err() {
            // SAFETY: it did not.
            unsafe { release_hook(user_data) };
        }
        taken
    }

    /// Restores the reduction that the options select.
    ///
    /// # Errors
    /// `InvalidState`: in the middle of a step.
    pub fn reset_hook(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_ddp_set_hook(self.inner.as_ptr(), None, ptr::null_mut(), None) })
    }

    /// Registers the model's buffers, such as running means and counters, checks that all ranks registered the same,
    /// and gives every rank the values of rank 0. Collective; may be called once.
    ///
    /// # Errors
    /// `Mismatch`: the ranks' buffers differ, and the message names the first difference; `InvalidState`: registered
    /// before, a view of one is alive, or in the middle of a step; `InvalidArgument`, `Timeout`, `Aborted`, `PeerLost`,
    /// `NoMemory`.
    pub fn register_buffers(&mut self, buffers: Params) -> Result<()> {
        let buffers = buffers.into_items()?;
        let held = Held::new(buffers.iter().map(|(name, tensor)| (name, tensor)), Use::Writes)?;
        let raw = RawParams::new(&buffers)?;
        // SAFETY: the tensors are kept for as long as the handle lives.
        check(unsafe { sys::tsr_ddp_register_buffers(self.inner.as_ptr(), raw.as_ptr(), buffers.len()) })?;
        drop(held);
        *self.inner.buffers.borrow_mut() = buffers;
        Ok(())
    }

    /// Broadcasts the buffers of rank 0, or of the lowest rank that has not joined, in one operation. Collective.
    ///
    /// # Errors
    /// `InvalidState`: none registered, a view of one is alive, or in the middle of a step; `Mismatch`, `Timeout`,
    /// `Aborted`, `PeerLost`.
    pub fn broadcast_buffers(&mut self) -> Result<()> {
        let buffers = self.inner.buffers.borrow();
        let _held = Held::new(buffers.iter().map(|(name, tensor)| (name, tensor)), Use::Writes)?;
        check(unsafe { sys::tsr_ddp_broadcast_buffers(self.inner.as_ptr()) })
    }

    /// Joins the steps of the other ranks with zero gradients until all ranks have joined. Every rank calls it when it
    /// has no data left; a new round of steps may begin afterwards. Gradients are then zero. With `sync_params`, if
    /// ranks made different numbers of steps, all get the parameters and buffers of the lowest rank that made the most
    /// steps.
    ///
    /// # Errors
    /// `InvalidState`: the model was created without [`DdpOptions::join`], a view of it is alive, or in the middle of a
    /// step; `Timeout`: a rank is late, even between two of its steps; `Mismatch`, `Aborted`, `PeerLost`;
    /// `Interrupted`: the model can no longer be used. The error of a hook.
    ///
    /// # Panics
    /// If a hook has panicked.
    pub fn join(&mut self, sync_params: bool) -> Result<()> {
        let buffers = self.inner.buffers.borrow();
        let group = self.group();
        let _params = Held::new(group.named_params(), Use::Writes)?;
        let _grads = Held::new(group.named_grads(), Use::Writes)?;
        let _buffers = Held::new(buffers.iter().map(|(name, tensor)| (name, tensor)), Use::Writes)?;
        check(unsafe { sys::tsr_ddp_join(self.inner.as_ptr(), i32::from(sync_params)) })
            .map_err(|error| self.hook_failure_or(error))
    }

    /// The step, counted from the model's creation, of this host's shared parameters if they are consistent. For the
    /// survivors of a rank's death: all of them call it once they have formed a new communicator. If the parameters are
    /// consistent and of the same step on all hosts, they may be saved or registered again; otherwise discard them and
    /// load the last checkpoint.
    ///
    /// # Errors
    /// `Corrupt`: slices are of different steps; the message names them; `InvalidState`: without
    /// [`DdpOptions::share_params`], or in the middle of a step.
    pub fn shared_step(&mut self) -> Result<i64> {
        let mut steps = 0;
        check(unsafe { sys::tsr_ddp_shared_step(self.inner.as_ptr(), &mut steps) })?;
        Ok(steps)
    }

    /// Sets every gradient to zero.
    ///
    /// # Errors
    /// `InvalidState`: between a `ready` and its `wait`, or a view of a gradient is alive.
    pub fn zero_grad(&mut self) -> Result<()> {
        let _grads = Held::new(self.group().named_grads(), Use::Writes)?;
        check(unsafe { sys::tsr_ddp_zero_grad(self.inner.as_ptr()) })
    }
}

impl fmt::Debug for Ddp<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.group().params.iter().map(|(name, tensor)| (name, tensor))).finish()
    }
}
