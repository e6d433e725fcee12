//! Data-parallel training.

use std::fmt;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use tessera_sys as sys;

use crate::comm::{Borrowed, Comm};
use crate::element::{Element, ReduceOp};
use crate::error::{check, Error, Result};
use crate::params::{group_accessors, GradientOf, Group, Params, RawParams};
use crate::raw;
use crate::store::created;
use crate::tensor::{Held, Tensor, Use, View, ViewMut};

/// Settings of a [`Ddp`]. What is not set is the library's default.
#[derive(Clone, Debug, Default)]
pub struct DdpOptions {
    bucket_bytes: Option<usize>,
    first_bucket_bytes: Option<usize>,
    op: Option<ReduceOp>,
}

impl DdpOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// A bucket of gradients closes when it reaches so many bytes. The default is 25 MiB.
    #[must_use]
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = Some(bytes);
        self
    }

    /// The same for the first bucket of each dtype, which is reduced first. The default is 1 MiB.
    #[must_use]
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = Some(bytes);
        self
    }

    /// What becomes of the ranks' gradients: [`ReduceOp::Avg`] or [`ReduceOp::Sum`]. The default is `Avg`.
    #[must_use]
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.op = Some(op);
        self
    }
}

/// A model of which every rank holds the same parameters, and computes gradients from its own samples.
///
/// It owns the parameters. The trainer writes each gradient into [`grad_mut`](Ddp::grad_mut) and says
/// [`ready`](Ddp::ready), in any order, while backward goes on; full buckets of gradients are averaged over the ranks
/// meanwhile. [`wait`](Ddp::wait) ends backward: then every gradient is the average, on every rank.
///
/// A gradient that is `ready` belongs to the library until `wait`: no view of it can be had. Views that still live make
/// `ready` (of that gradient), an optimizer's step and a load fail with
/// [`Code::InvalidState`](crate::Code::InvalidState); drop them at the end of a block.
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
    /// `Mismatch`: the ranks' parameters differ, and the message names the first difference; `InvalidArgument`: a length
    /// does not fit its shape, a dtype is no floating-point one, a name comes twice; `Timeout`, `Aborted`, `PeerLost`,
    /// `NoMemory`.
    pub fn new(comm: &'c Comm, params: Params) -> Result<Self> {
        Self::with_options(comm, params, &DdpOptions::new())
    }

    /// [`Ddp::new`] with settings.
    ///
    /// # Errors
    /// As there.
    pub fn with_options(comm: &'c Comm, params: Params, options: &DdpOptions) -> Result<Self> {
        let params = params.into_items()?;
        // The library writes rank 0's values and then reads at every step: nobody may hold a view now.
        let held = Held::new(params.iter().map(|(name, tensor)| (name, tensor)), Use::Writes)?;
        let raw_params = RawParams::new(&params)?;
        // SAFETY: the communicator exists, so the library is loaded.
        let mut raw = unsafe { raw::options(sys::tsr_ddp_options_init) }?;
        if let Some(bytes) = options.bucket_bytes {
            raw.bucket_bytes = bytes;
        }
        if let Some(bytes) = options.first_bucket_bytes {
            raw.first_bucket_bytes = bytes;
        }
        if let Some(op) = options.op {
            raw.op = op.as_raw();
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the new object keeps the tensors, and borrows the communicator, for as long as C does.
        check(unsafe { sys::tsr_ddp_create(comm.as_ptr(), raw_params.as_ptr(), params.len(), &raw, &mut handle) })?;
        drop(held);
        let mut inner = Inner { handle: created(handle)?, group: Group { params, grads: Vec::new() } };
        let mut count = 0;
        // SAFETY: the handle is alive.
        check(unsafe { sys::tsr_ddp_param_count(inner.as_ptr(), &mut count) })?;
        if count != inner.group.params.len() {
            return Err(Error::state(format!(
                "{} parameters were registered, {count} are there",
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

    /// Says that gradient `index` is written. In any order, each once a step. A full bucket is reduced in the
    /// background.
    ///
    /// # Errors
    /// `InvalidState`: said twice, or a view of the gradient is alive; `InvalidArgument`: there is no such parameter;
    /// `Aborted`.
    pub fn ready(&self, index: usize) -> Result<()> {
        let grad = self.group().grad(index)?;
        if !grad.is_lent() {
            grad.lend(&GradientOf(self.group().name(index)))?;
        }
        // SAFETY: the handle is alive and used by this thread alone; so in every method below. The gradient is lent.
        check(unsafe { sys::tsr_ddp_ready(self.inner.as_ptr(), index) })
    }

    /// Says that every gradient not yet said is written.
    ///
    /// # Errors
    /// `InvalidState`: a view of one of them is alive; `Aborted`.
    pub fn ready_all(&self) -> Result<()> {
        let group = self.group();
        let not_yet = || group.named_grads().filter(|(_, grad)| !grad.is_lent());
        not_yet().try_for_each(|(name, grad)| grad.check_writable(&name))?;
        not_yet().try_for_each(|(name, grad)| grad.lend(&name))?;
        check(unsafe { sys::tsr_ddp_ready_all(self.inner.as_ptr()) })
    }

    /// The end of backward: returns when every gradient is the average (or sum) over the ranks. Collective.
    ///
    /// # Errors
    /// `InvalidState`: parameters were never said ready; the message names them, and the step can be completed and
    /// waited for again. `Timeout`, `Aborted`, `PeerLost`, `Mismatch`: the gradients stay out of reach. `Interrupted`:
    /// call it again.
    pub fn wait(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_ddp_wait(self.inner.as_ptr()) })?;
        self.group().grads.iter().for_each(Tensor::take_back);
        Ok(())
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
