//! Dynamic scaling of losses.

use std::fmt;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use tessera_sys as sys;

use crate::error::{check, Result};
use crate::optim::Optimizer;
use crate::raw::created;
use crate::settings::{grad_scaler_setters, GradScalerSettings};

/// A scale for the loss that follows what becomes of the gradients, so that small ones of [`F16`](crate::DType::F16) are not
/// lost, as `torch.amp.GradScaler` has it. A step whose gradients have an infinity or NaN is left out, over an
/// [`Fsdp`](crate::Fsdp) on all ranks if any has one, and the scale becomes smaller; after some steps in a row that were made
/// it grows. Each rank has its own; they stay alike. A [`State`](crate::State) saves it with its settings.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, GradScaler, Local, Sgd, Tensor};
/// let weights = params!["w" => (vec![1.0f32; 2], [2])];
/// let mut model = Local::new(weights)?;
/// let mut opt = Sgd::new(&mut model).lr(1.0).build()?;
/// let mut scaler = GradScaler::builder().init_scale(8.0).build()?;
/// model.grad_mut(0)?.fill(0.25 * scaler.scale()? as f32); // the gradient of the loss times the scale
/// assert!(scaler.step(&mut opt)?);
/// scaler.update()?;
/// assert_eq!(model.param(0)?[..], [0.75; 2]);
/// # Ok(()) }
/// ```
pub struct GradScaler {
    inner: Rc<GradScalerInner>,
}

/// Shared with the states whose C side points at it.
pub(crate) struct GradScalerInner(NonNull<sys::tsr_grad_scaler>);

impl Drop for GradScalerInner {
    fn drop(&mut self) {
        // SAFETY: this was the last owner.
        unsafe { sys::tsr_grad_scaler_destroy(self.as_ptr()) }
    }
}

impl GradScalerInner {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_grad_scaler {
        self.0.as_ptr()
    }
}

/// Builds a [`GradScaler`]. What is not set is the library's default, which is PyTorch's. The same on every rank.
#[derive(Debug, Default)]
#[must_use = "it is a builder: call build()"]
pub struct GradScalerBuilder {
    settings: GradScalerSettings,
}

impl GradScalerBuilder {
    grad_scaler_setters!();

    /// Makes the scaler.
    ///
    /// # Errors
    /// `InvalidArgument`: a setting cannot be.
    pub fn build(self) -> Result<GradScaler> {
        crate::load()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the options are borrowed for the call.
        self.settings.with_raw(|raw| check(unsafe { sys::tsr_grad_scaler_create(raw, &mut handle) }))?;
        Ok(GradScaler { inner: Rc::new(GradScalerInner(created(handle)?)) })
    }
}

impl GradScaler {
    /// Begins a scaler.
    pub fn builder() -> GradScalerBuilder {
        GradScalerBuilder::default()
    }

    pub(crate) fn inner(&self) -> &Rc<GradScalerInner> {
        &self.inner
    }

    /// What losses, or the gradients where backward begins, are multiplied by.
    ///
    /// # Errors
    /// None in practice.
    pub fn scale(&self) -> Result<f64> {
        let mut scale = 0.0;
        // SAFETY: the handle is alive and used by this thread alone; so in every method below.
        check(unsafe { sys::tsr_grad_scaler_scale(self.inner.as_ptr(), &mut scale) })?;
        Ok(scale)
    }

    /// Divides the gradients by the scale before the step, to bound them; once between two updates. Collective over an
    /// [`Fsdp`](crate::Fsdp).
    ///
    /// # Errors
    /// `InvalidState`: they are unscaled already or being reduced, a view of one is alive, or the optimizer steps in
    /// backward. Over an `Fsdp` also `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, and `Interrupted`, after which its
    /// communicator is out of use.
    pub fn unscale(&mut self, optimizer: &mut Optimizer<'_>) -> Result<()> {
        let _grads = optimizer.hold_grads()?;
        check(unsafe { sys::tsr_grad_scaler_unscale(self.inner.as_ptr(), optimizer.inner().as_ptr()) })
    }

    /// Makes the optimizer's step, unless its gradients, divided by the scale if they were not yet, have an infinity or NaN.
    /// Returns whether it was made, the same on every rank. Collective over an [`Fsdp`](crate::Fsdp).
    ///
    /// # Errors
    /// As [`Self::unscale`]; `InvalidState` also for a second step before [`Self::update`], and while a view of a parameter
    /// is alive.
    pub fn step(&mut self, optimizer: &mut Optimizer<'_>) -> Result<bool> {
        let _params = optimizer.hold_params()?;
        let _grads = optimizer.hold_grads()?;
        let mut stepped = 0;
        check(unsafe { sys::tsr_grad_scaler_step(self.inner.as_ptr(), optimizer.inner().as_ptr(), &mut stepped) })?;
        Ok(stepped != 0)
    }

    /// Ends an iteration: the scale of the next, by what was found in the gradients of all optimizers.
    ///
    /// # Errors
    /// `InvalidState`: no gradients were unscaled since the last update.
    pub fn update(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_grad_scaler_update(self.inner.as_ptr()) })
    }
}

impl fmt::Debug for GradScaler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradScaler").field("scale", &self.scale().ok()).finish()
    }
}
