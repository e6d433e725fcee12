//! Dynamic loss scaling.

use std::fmt;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use tessera_sys as sys;

use crate::error::{check, Result};
use crate::optim::Optimizer;
use crate::raw::created;
use crate::settings::{grad_scaler_setters, GradScalerSettings};

/// A dynamic scale for the loss, like `torch.amp.GradScaler`, so that small [`F16`](crate::DType::F16) gradients are
/// not lost. A step whose gradients hold an infinity or NaN (over an [`Fsdp`](crate::Fsdp) or a
/// [`TensorParallel`](crate::TensorParallel): on any rank) is skipped, on all ranks, and the scale shrinks; after some
/// successful steps in a row it grows. Each rank has its own scaler; they stay equal. A [`State`](crate::State) saves it
/// with its settings.
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

/// Builds a [`GradScaler`]. Settings that are not set have the library's defaults, which are PyTorch's. The same on
/// every rank.
#[derive(Debug, Default)]
#[must_use = "it is a builder: call build()"]
pub struct GradScalerBuilder {
    settings: GradScalerSettings,
}

impl GradScalerBuilder {
    grad_scaler_setters!();

    /// Creates the scaler.
    ///
    /// # Errors
    /// `InvalidArgument`: a setting is invalid.
    pub fn build(self) -> Result<GradScaler> {
        crate::load()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the options are borrowed for the call.
        self.settings.with_raw(|raw| check(unsafe { sys::tsr_grad_scaler_create(raw, &mut handle) }))?;
        Ok(GradScaler { inner: Rc::new(GradScalerInner(created(handle)?)) })
    }
}

impl GradScaler {
    /// Starts building a scaler.
    pub fn builder() -> GradScalerBuilder {
        GradScalerBuilder::default()
    }

    pub(crate) fn inner(&self) -> &Rc<GradScalerInner> {
        &self.inner
    }

    /// The factor for losses, or for the gradients where backward begins.
    ///
    /// # Errors
    /// None in practice.
    pub fn scale(&self) -> Result<f64> {
        let mut scale = 0.0;
        // SAFETY: the handle is alive and used by this thread alone; so in every method below.
        check(unsafe { sys::tsr_grad_scaler_scale(self.inner.as_ptr(), &mut scale) })?;
        Ok(scale)
    }

    /// Divides the gradients by the scale before the step, for example to clip them. At most once between updates.
    /// Collective over an [`Fsdp`](crate::Fsdp).
    ///
    /// # Errors
    /// `InvalidState`: they are already unscaled or being reduced, a view of one is alive, or the optimizer steps in
    /// backward. Over an `Fsdp` also `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, and `Interrupted`, after which its
    /// communicator can no longer be used.
    pub fn unscale(&mut self, optimizer: &mut Optimizer<'_>) -> Result<()> {
        let _grads = optimizer.hold_grads()?;
        check(unsafe { sys::tsr_grad_scaler_unscale(self.inner.as_ptr(), optimizer.inner().as_ptr()) })
    }

    /// Divides the gradients by the scale, unless [`Self::unscale`] has, and steps the optimizer if all are finite.
    /// Returns whether it stepped, the same on every rank. Collective over an [`Fsdp`](crate::Fsdp).
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

    /// Ends the iteration: updates the scale according to the gradients of all optimizers.
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
