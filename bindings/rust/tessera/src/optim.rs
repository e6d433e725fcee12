//! Optimizers: SGD, Adam, AdamW, Adagrad, Lion, Lamb.

use std::fmt;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use tessera_sys as sys;

use crate::comm::{Borrowed, Comm};
use crate::cuda_params::{CudaGroup, CudaParams};
use crate::ddp::{Ddp, Inner};
use crate::error::{check, Result};
use crate::fsdp::{Fsdp, FsdpInner};
use crate::params::{Group, Local, RawParams};
use crate::raw::created;
use crate::settings::{
    adagrad_setters, adam_setters, adamw_setters, lamb_setters, lion_setters, sgd_setters, AdagradSettings,
    AdamSettings, AdamwSettings, LambSettings, LionSettings, SgdSettings,
};
use crate::tensor::{Held, Tensor, Use};
use crate::tp::{TensorParallel, TpInner};

mod sealed {
    /// Where parameters and gradients come from.
    #[derive(Clone, Debug)]
    pub enum Source {
        Ddp(std::rc::Rc<super::Inner>),
        Fsdp(std::rc::Rc<super::FsdpInner>),
        TensorParallel(std::rc::Rc<super::TpInner>),
        Local(std::rc::Rc<super::Group>),
        Cuda(std::rc::Rc<super::CudaGroup>),
    }

    pub trait Sealed {
        fn source(&self) -> Source;
    }
}
use sealed::{Sealed, Source};

impl Source {
    fn group(&self) -> Result<&Group> {
        Ok(match self {
            Source::Ddp(inner) => &inner.group,
            Source::Fsdp(inner) => &inner.trained,
            Source::TensorParallel(inner) => inner.trained()?,
            Source::Local(group) => group,
            Source::Cuda(group) => &group.views,
        })
    }
}

/// What an optimizer updates: a [`Ddp`], the shards of an [`Fsdp`], the floating-point slices of a [`TensorParallel`], a
/// [`Local`], or [`CudaParams`]. `'c` is the lifetime for which its communicator or mesh is borrowed.
pub trait Trainable<'c>: Sealed {}

impl Sealed for Ddp<'_> {
    fn source(&self) -> Source {
        Source::Ddp(Rc::clone(self.inner()))
    }
}
impl<'c> Trainable<'c> for Ddp<'c> {}

impl Sealed for Fsdp<'_> {
    fn source(&self) -> Source {
        Source::Fsdp(Rc::clone(self.inner()))
    }
}
impl<'c> Trainable<'c> for Fsdp<'c> {}

impl Sealed for TensorParallel<'_> {
    fn source(&self) -> Source {
        Source::TensorParallel(Rc::clone(self.inner()))
    }
}
impl<'c> Trainable<'c> for TensorParallel<'c> {}

impl Sealed for Local {
    fn source(&self) -> Source {
        Source::Local(Rc::clone(&self.group))
    }
}
impl<'c> Trainable<'c> for Local {}

impl Sealed for CudaParams {
    fn source(&self) -> Source {
        Source::Cuda(Rc::clone(&self.group))
    }
}
impl<'c> Trainable<'c> for CudaParams {}

macro_rules! builder {
    (
        $(#[$doc:meta])*
        $name:ident, $settings:ident, $setters:ident, $over_ddp:ident, $over_fsdp:ident, $over_tp:ident,
        $create:ident
    ) => {
        $(#[$doc])*
        ///
        /// Settings that are not set have the library's defaults.
        #[must_use = "it is a builder: call build()"]
        pub struct $name<'c> {
            source: Source,
            settings: $settings,
            comm: Borrowed<'c>,
        }

        impl<'c> $name<'c> {
            /// An optimizer of these parameters.
            pub fn new(model: &mut impl Trainable<'c>) -> Self {
                $name { source: model.source(), settings: $settings::default(), comm: Borrowed::new() }
            }

            $setters!();

            /// The optimizer; its moments are zero.
            ///
            /// # Errors
            /// `InvalidArgument`: a setting is out of range, or a parameter is neither `f32` nor `f64`; `NoMemory`; those
            /// of [`load`](crate::load).
            pub fn build(self) -> Result<Optimizer<'c>> {
                crate::load()?;
                let mut handle = ptr::null_mut();
                self.settings.with_raw(|raw| match &self.source {
                    // SAFETY: the optimizer keeps the DDP object, and both borrow the communicator.
                    Source::Ddp(inner) => check(unsafe { sys::$over_ddp(inner.as_ptr(), raw, &mut handle) }),
                    // SAFETY: the same.
                    Source::Fsdp(inner) => check(unsafe { sys::$over_fsdp(inner.as_ptr(), raw, &mut handle) }),
                    Source::TensorParallel(inner) => {
                        inner.trained()?;
                        // SAFETY: the same, of the model and its mesh.
                        check(unsafe { sys::$over_tp(inner.as_ptr(), raw, &mut handle) })
                    }
                    Source::Local(group) => {
                        let params = RawParams::new(&group.params)?;
                        let grads: Vec<_> = group.grads.iter().map(Tensor::as_raw).collect();
                        // SAFETY: the optimizer keeps parameters and gradients.
                        check(unsafe { sys::$create(params.as_ptr(), grads.as_ptr(), grads.len(), raw, &mut handle) })
                    }
                    Source::Cuda(group) => group.with_raw(|params, grads| {
                        // SAFETY: whoever made the tensors keeps their memory until the optimizer is dropped.
                        check(unsafe { sys::$create(params.as_ptr(), grads.as_ptr(), grads.len(), raw, &mut handle) })
                    }),
                })?;
                let handle = created(handle)?;
                let owner = Owner::Model(self.source);
                Ok(Optimizer { inner: Rc::new(OptimizerInner { handle, owner }), _comm: self.comm })
            }
        }

        impl fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    };
}

builder! {
    /// Stochastic gradient descent, as PyTorch defines it.
    Sgd, SgdSettings, sgd_setters, tsr_ddp_sgd, tsr_fsdp_sgd, tsr_tp_sgd, tsr_sgd_create
}

builder! {
    /// Adam (Kingma and Ba 2015) with bias correction.
    Adam, AdamSettings, adam_setters, tsr_ddp_adam, tsr_fsdp_adam, tsr_tp_adam, tsr_adam_create
}

builder! {
    /// AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay.
    AdamW, AdamwSettings, adamw_setters, tsr_ddp_adamw, tsr_fsdp_adamw, tsr_tp_adamw, tsr_adamw_create
}

builder! {
    /// Adagrad (Duchi et al. 2011), as PyTorch defines it.
    Adagrad, AdagradSettings, adagrad_setters, tsr_ddp_adagrad, tsr_fsdp_adagrad, tsr_tp_adagrad, tsr_adagrad_create
}

builder! {
    /// Lion (Chen et al. 2023): each element moves by `lr` against the sign of a mean of gradients. An element whose mean is
    /// 0 stays, where DeepSpeed's Lion moves it.
    Lion, LionSettings, lion_setters, tsr_ddp_lion, tsr_fsdp_lion, tsr_tp_lion, tsr_lion_create
}

builder! {
    /// Lamb (You et al. 2020) as DeepSpeed's FusedLamb, for parameters on the CPU: the direction of Adam plus weight decay,
    /// scaled for each parameter by its trust ratio, the norm of the parameter over that of the direction, or 1 if one of
    /// them is 0. The norms have the same bits however ranks divide a parameter. Over an [`Fsdp`], a [`TensorParallel`] or a
    /// [`Ddp`] of its slices, [`Optimizer::step`] is collective; a [`Ddp`] with `share_params` is `Unsupported`.
    Lamb, LambSettings, lamb_setters, tsr_ddp_lamb, tsr_fsdp_lamb, tsr_tp_lamb, tsr_lamb_create
}

/// An optimizer, created by a builder such as [`Sgd`] or [`AdamW`], or that of an [`Engine`](crate::Engine::optimizer). It
/// keeps the parameters alive.
pub struct Optimizer<'c> {
    inner: Rc<OptimizerInner>,
    _comm: Borrowed<'c>,
}

/// Shared with the states whose C side points at it.
pub(crate) struct OptimizerInner {
    handle: NonNull<sys::tsr_optimizer>,
    owner: Owner, // dropped after the handle
}

/// An engine, which makes its optimizer.
pub(crate) trait Owns {
    /// What an optimizer changes in the program's memory; not while views of parameters or gradients may be alive.
    fn group(&self) -> Result<&Group>;
}

/// What keeps the parameters.
enum Owner {
    Model(Source),
    Engine(Rc<dyn Owns>),
}

impl Drop for OptimizerInner {
    fn drop(&mut self) {
        // SAFETY: this was the last owner; the DDP object or the tensors are dropped after this.
        unsafe { sys::tsr_optimizer_destroy(self.handle.as_ptr()) }
    }
}

impl OptimizerInner {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_optimizer {
        self.handle.as_ptr()
    }
}

impl<'c> Optimizer<'c> {
    /// Another handle of an engine's optimizer.
    pub(crate) fn of_engine(handle: NonNull<sys::tsr_optimizer>, engine: Rc<dyn Owns>) -> Self {
        let owner = Owner::Engine(engine);
        Optimizer { inner: Rc::new(OptimizerInner { handle, owner }), _comm: Borrowed::new() }
    }

    pub(crate) fn inner(&self) -> &Rc<OptimizerInner> {
        &self.inner
    }

    fn group(&self) -> Result<&Group> {
        match &self.inner.owner {
            Owner::Model(source) => source.group(),
            Owner::Engine(inner) => inner.group(),
        }
    }

    /// Checks that no view of the parameters or gradients is alive while the library changes them.
    pub(crate) fn hold_params(&self) -> Result<Held<'_>> {
        Held::new(self.group()?.named_params(), Use::Writes)
    }

    pub(crate) fn hold_grads(&self) -> Result<Held<'_>> {
        Held::new(self.group()?.named_grads(), Use::Writes)
    }

    /// Updates every parameter from its gradient, which is unchanged.
    ///
    /// # Errors
    /// `InvalidState`: gradients are being reduced, or none were reduced since the last step (with synchronisation; for a
    /// [`TensorParallel`] if [`sum_grads`](TensorParallel::sum_grads) has some to sum); a unit of an [`Fsdp`] is
    /// unsharded; or a view of a parameter (or a mutable one of a gradient) is alive. [`Lamb`] over an [`Fsdp`] or a
    /// [`TensorParallel`], whose step is collective: also those of [`Self::clip_grad_norm`].
    pub fn step(&mut self) -> Result<()> {
        let _params = self.hold_params()?;
        let _grads = Held::new(self.group()?.named_grads(), Use::Reads)?;
        // SAFETY: the handle is alive and used by this thread alone; no view is alive; so in every method below.
        check(unsafe { sys::tsr_optimizer_step(self.inner.as_ptr()) })
    }

    /// Sets every gradient to zero.
    ///
    /// # Errors
    /// `InvalidState`: gradients are being reduced, or a view of one is alive.
    pub fn zero_grad(&mut self) -> Result<()> {
        let _grads = self.hold_grads()?;
        check(unsafe { sys::tsr_optimizer_zero_grad(self.inner.as_ptr()) })
    }

    /// Joins the optimizers of ranks that have different parameters, such as the stages of a pipeline: from now on
    /// [`Self::clip_grad_norm`] and a scaler's unscaling take the gradients of all of them into account and are
    /// collective. A parameter that several stages share under the same name counts once. All these ranks must call it,
    /// once. `comm` has one rank of each stage.
    ///
    /// # Errors
    /// `InvalidArgument`: two ranks hold different parts of a parameter; `InvalidState`: a rank has joined its optimizer
    /// already; `Timeout`, `Aborted`, `PeerLost`.
    pub fn join(&mut self, comm: &'c Comm) -> Result<()> {
        // SAFETY: both handles are alive; the library keeps what it uses of the communicator.
        check(unsafe { sys::tsr_optimizer_join(self.inner.as_ptr(), comm.as_ptr()) })
    }

    /// Scales all gradients so that their norm is at most `max_norm`, as PyTorch's `clip_grad_norm_` does, and returns
    /// the norm before scaling: infinite if there are infinities or NaN, which are left unchanged. `p` is the norm's
    /// order: 2, any number of at least 1, or [`f64::INFINITY`] for the largest magnitude. Call it before the step.
    ///
    /// Over an [`Fsdp`] or a [`TensorParallel`] it uses the norm of all shards or slices, each counted once, and is
    /// collective. Over a [`Ddp`], whose gradients are the same on every rank, it is local unless [`Self::join`] was
    /// called.
    ///
    /// # Errors
    /// `InvalidArgument`: `max_norm` is negative or not finite, or `p` is below 1; `InvalidState`: gradients are being
    /// reduced, a unit of an [`Fsdp`] is unsharded, a view of a gradient is alive, or the optimizer steps in backward.
    /// Over an [`Fsdp`] or a [`TensorParallel`] also `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, and `Interrupted`,
    /// after which its communicator can no longer be used.
    pub fn clip_grad_norm(&mut self, max_norm: f64, p: f64) -> Result<f64> {
        let _grads = self.hold_grads()?;
        let mut norm = 0.0;
        check(unsafe { sys::tsr_optimizer_clip_grad_norm(self.inner.as_ptr(), max_norm, p, &mut norm) })?;
        Ok(norm)
    }

    /// Clamps every gradient to `-most..=most`; NaN is unchanged. Call it before the step.
    ///
    /// # Errors
    /// `InvalidArgument`: `most` is negative, or not finite; `InvalidState`: as [`Self::clip_grad_norm`].
    pub fn clip_grad_value(&mut self, most: f64) -> Result<()> {
        let _grads = self.hold_grads()?;
        check(unsafe { sys::tsr_optimizer_clip_grad_value(self.inner.as_ptr(), most) })
    }

    /// Runs all later calls in the order of a CUDA stream, for [`CudaParams`]. Before the first call they run on the
    /// device's default stream. [`step`](Self::step) and [`zero_grad`](Self::zero_grad) return once they are on the
    /// stream; calls that return a number wait for it.
    ///
    /// # Errors
    /// `InvalidArgument`: the stream is of another device, or the parameters are in host memory; `Cuda`.
    ///
    /// # Safety
    /// `stream` is a CUDA stream (`cudaStream_t`), or null for the default one. It exists until the optimizer has another
    /// one or is dropped.
    pub unsafe fn set_stream(&mut self, stream: *mut std::ffi::c_void) -> Result<()> {
        check(unsafe { sys::tsr_optimizer_set_stream(self.inner.as_ptr(), stream) })
    }

    /// The learning rate of the next step.
    ///
    /// # Errors
    /// None in practice.
    pub fn lr(&self) -> Result<f64> {
        let mut lr = 0.0;
        check(unsafe { sys::tsr_optimizer_lr(self.inner.as_ptr(), &mut lr) })?;
        Ok(lr)
    }

    /// Sets the learning rate of the next step.
    ///
    /// # Errors
    /// `InvalidArgument`: it is negative, or not finite.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        check(unsafe { sys::tsr_optimizer_set_lr(self.inner.as_ptr(), lr) })
    }

    /// The number of steps made, including those before a loaded checkpoint.
    ///
    /// # Errors
    /// None in practice.
    pub fn steps(&self) -> Result<u64> {
        let mut steps = 0;
        check(unsafe { sys::tsr_optimizer_steps(self.inner.as_ptr(), &mut steps) })?;
        Ok(u64::try_from(steps).unwrap_or(0))
    }
}

impl Ddp<'_> {
    /// Lets an optimizer of this model update the parameters of each bucket in the background, once it is reduced.
    /// After `wait` all parameters are updated, with the same bits as [`Optimizer::step`] would give, which is refused
    /// from now on. From the `ready` of its gradient to `wait`, a parameter belongs to the library and cannot be
    /// viewed.
    ///
    /// # Errors
    /// `InvalidArgument`: the optimizer was not created from this model; `InvalidState`: in the middle of a step, or
    /// another optimizer already steps in backward.
    pub fn step_in_backward(&mut self, optimizer: &mut Optimizer<'_>) -> Result<()> {
        // SAFETY: both handles are alive and used by this thread alone.
        check(unsafe { sys::tsr_ddp_step_in_backward(self.inner().as_ptr(), optimizer.inner().as_ptr()) })?;
        self.inner().steps.set(true);
        Ok(())
    }
}

impl fmt::Debug for Optimizer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Optimizer").field("lr", &self.lr().ok()).field("steps", &self.steps().ok()).finish()
    }
}
