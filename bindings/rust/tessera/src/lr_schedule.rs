//! Learning-rate schedules.

use std::fmt;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use tessera_sys as sys;

use crate::choices::{LrDecay, LrWarmup};
use crate::error::{check, Result};
use crate::optim::Optimizer;
use crate::raw::{self, created};
use crate::settings::{
    lr_one_cycle_setters, lr_warmup_cosine_setters, lr_warmup_setters, LrOneCycleSettings, LrWarmupCosineSettings,
    LrWarmupSettings,
};

/// A learning-rate schedule: it computes the rate of any step, and sets optimizers. `docs/SCHEDULES.md` has the formulas.
/// Steps count from 0, the optimizer's first. `base_lr` is an optimizer's own rate when it is attached. A
/// [`State`](crate::State) saves and loads the step and the base rates.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, Local, LrSchedule, Sgd};
/// let mut model = Local::new(params!["w" => (vec![1.0f32; 2], [2])])?;
/// let mut opt = Sgd::new(&mut model).lr(1.0).build()?;
/// let warmup = LrSchedule::linear(0.1, 1.0, 10)?;
/// let mut schedule = LrSchedule::sequential([&warmup, &LrSchedule::cosine(90, 0.0)?], &[10])?;
/// schedule.attach(&mut opt)?;
/// assert_eq!(opt.lr()?, 0.1);
/// for _ in 0..10 {
///     opt.step()?;
///     schedule.step()?;
/// }
/// assert_eq!(opt.lr()?, 1.0);
/// # Ok(()) }
/// ```
pub struct LrSchedule {
    inner: Rc<LrScheduleInner>,
}

/// Shared with the states whose C side points at it.
pub(crate) struct LrScheduleInner(NonNull<sys::tsr_lr_schedule>);

impl Drop for LrScheduleInner {
    fn drop(&mut self) {
        // SAFETY: this was the last owner.
        unsafe { sys::tsr_lr_schedule_destroy(self.as_ptr()) }
    }
}

impl LrScheduleInner {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_lr_schedule {
        self.0.as_ptr()
    }
}

macro_rules! builder {
    ($(#[$doc:meta])* $name:ident, $settings:ident, $setters:ident, $create:ident) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        #[must_use = "it is a builder: call build()"]
        pub struct $name {
            settings: $settings,
        }

        impl $name {
            $setters!();

            /// Creates the schedule.
            ///
            /// # Errors
            /// `InvalidArgument`: a setting is invalid.
            pub fn build(self) -> Result<LrSchedule> {
                // SAFETY: the options are borrowed for the call.
                made(|out| self.settings.with_raw(|raw| check(unsafe { sys::$create(raw, out) })))
            }
        }
    };
}

builder! {
    /// Builds DeepSpeed's WarmupLR or, with [`total_num_steps`](Self::total_num_steps), its WarmupDecayLR. Settings that
    /// are not set have the library's defaults, which are DeepSpeed's.
    LrWarmupBuilder, LrWarmupSettings, lr_warmup_setters, tsr_lr_warmup
}

builder! {
    /// Builds DeepSpeed's WarmupCosineLR. Settings that are not set have the library's defaults, which are DeepSpeed's;
    /// [`total_num_steps`](Self::total_num_steps) has none.
    LrWarmupCosineBuilder, LrWarmupCosineSettings, lr_warmup_cosine_setters, tsr_lr_warmup_cosine
}

builder! {
    /// Builds DeepSpeed's OneCycle. Settings that are not set have the library's defaults, which are DeepSpeed's;
    /// [`cycle_max_lr`](Self::cycle_max_lr) has none.
    LrOneCycleBuilder, LrOneCycleSettings, lr_one_cycle_setters, tsr_lr_one_cycle
}

/// The schedule that `create` stores.
pub(crate) fn made(create: impl FnOnce(*mut *mut sys::tsr_lr_schedule) -> Result<()>) -> Result<LrSchedule> {
    crate::load()?;
    let mut handle = ptr::null_mut();
    create(&mut handle)?;
    Ok(LrSchedule { inner: Rc::new(LrScheduleInner(created(handle)?)) })
}

/// A number of steps as C takes it.
fn steps(what: &str, value: u64) -> Result<i64> {
    Ok(raw::fitting(what, Some(value))?.unwrap_or_default())
}

fn all_steps(what: &str, values: &[u64]) -> Result<Vec<i64>> {
    values.iter().map(|&value| steps(what, value)).collect()
}

impl LrSchedule {
    /// `base_lr` times `factor` for the first steps, then `base_lr` (PyTorch's ConstantLR).
    ///
    /// # Errors
    /// `InvalidArgument`: an argument is out of range; so for all that follow.
    pub fn constant(factor: f64, total_steps: u64) -> Result<Self> {
        let total = steps("total_steps", total_steps)?;
        // SAFETY: `out` is ours; so below.
        made(|out| check(unsafe { sys::tsr_lr_constant(factor, total, out) }))
    }

    /// `base_lr` times a factor that changes linearly, then stays (PyTorch's LinearLR).
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn linear(start_factor: f64, end_factor: f64, total_steps: u64) -> Result<Self> {
        let total = steps("total_steps", total_steps)?;
        made(|out| check(unsafe { sys::tsr_lr_linear(start_factor, end_factor, total, out) }))
    }

    /// `base_lr` times `gamma` to the power of step / `step_size`, rounded down (PyTorch's StepLR).
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn step_decay(step_size: u64, gamma: f64) -> Result<Self> {
        let size = steps("step_size", step_size)?;
        made(|out| check(unsafe { sys::tsr_lr_step_decay(size, gamma, out) }))
    }

    /// `base_lr` times `gamma` for each milestone that was reached, in ascending order (PyTorch's MultiStepLR).
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn multi_step_decay(milestones: &[u64], gamma: f64) -> Result<Self> {
        let at = all_steps("a milestone", milestones)?;
        // SAFETY: the milestones are borrowed for the call.
        made(|out| check(unsafe { sys::tsr_lr_multi_step_decay(at.as_ptr(), at.len(), gamma, out) }))
    }

    /// `base_lr` times `gamma` to the power of the step (PyTorch's ExponentialLR).
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn exponential(gamma: f64) -> Result<Self> {
        made(|out| check(unsafe { sys::tsr_lr_exponential(gamma, out) }))
    }

    /// `base_lr` times (1 - step / `total_steps`) to the power of `power`, then 0 (PyTorch's PolynomialLR).
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn polynomial(total_steps: u64, power: f64) -> Result<Self> {
        let total = steps("total_steps", total_steps)?;
        made(|out| check(unsafe { sys::tsr_lr_polynomial(total, power, out) }))
    }

    /// From `base_lr` to `min_lr` in `total_steps` along half a cosine, and back, repeatedly (PyTorch's
    /// CosineAnnealingLR): the rate rises again after `total_steps`.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn cosine(total_steps: u64, min_lr: f64) -> Result<Self> {
        let total = steps("total_steps", total_steps)?;
        made(|out| check(unsafe { sys::tsr_lr_cosine(total, min_lr, out) }))
    }

    /// From `base_lr` to `min_lr` along half a cosine, then again from `base_lr`, each cycle `multiplier` times longer
    /// than the previous one (PyTorch's CosineAnnealingWarmRestarts).
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn cosine_restarts(first_steps: u64, multiplier: u64, min_lr: f64) -> Result<Self> {
        let (first, times) = (steps("first_steps", first_steps)?, steps("multiplier", multiplier)?);
        made(|out| check(unsafe { sys::tsr_lr_cosine_restarts(first, times, min_lr, out) }))
    }

    /// `base_lr` times min(s / w, sqrt(w / s)), where s is the step + 1 and w the number of warm-up steps (Vaswani et al.
    /// 2017).
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn inverse_sqrt(warmup_steps: u64) -> Result<Self> {
        let warmup = steps("warmup_steps", warmup_steps)?;
        made(|out| check(unsafe { sys::tsr_lr_inverse_sqrt(warmup, out) }))
    }

    /// Warm-up, stable, decay (Hu et al. 2024): `base_lr` times a factor that rises linearly from `min_ratio` to 1, stays,
    /// falls to `min_ratio`, and stays.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn wsd(warmup_steps: u64, stable_steps: u64, decay_steps: u64, decay: LrDecay, min_ratio: f64) -> Result<Self> {
        let (warmup, stable) = (steps("warmup_steps", warmup_steps)?, steps("stable_steps", stable_steps)?);
        let last = steps("decay_steps", decay_steps)?;
        made(|out| check(unsafe { sys::tsr_lr_wsd(warmup, stable, last, decay as i32, min_ratio, out) }))
    }

    /// Starts building DeepSpeed's WarmupLR or WarmupDecayLR. Its iteration number is the step - 1.
    pub fn warmup() -> LrWarmupBuilder {
        LrWarmupBuilder::default()
    }

    /// Starts building DeepSpeed's WarmupCosineLR. Its iteration number is the step - 1; at step 0 the rate is 0.
    pub fn warmup_cosine() -> LrWarmupCosineBuilder {
        LrWarmupCosineBuilder::default()
    }

    /// Starts building DeepSpeed's OneCycle, which sets the rate whatever `base_lr` is, and the momentum: that of SGD, or
    /// the first beta of Adam and AdamW.
    pub fn one_cycle() -> LrOneCycleBuilder {
        LrOneCycleBuilder::default()
    }

    /// `min_lr` times 1 + `step_rate` * step / `step_size`, whatever `base_lr` is (DeepSpeed's LRRangeTest). With
    /// `staircase`, step / `step_size` is rounded down.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn range_test(min_lr: f64, step_size: u64, step_rate: f64, staircase: bool) -> Result<Self> {
        let size = steps("step_size", step_size)?;
        made(|out| check(unsafe { sys::tsr_lr_range_test(min_lr, size, step_rate, staircase.into(), out) }))
    }

    /// One schedule after the other (PyTorch's SequentialLR), of which the second to last begin, with their step 0, at
    /// the milestones. At most 1000 with all that they are composed of, nested at most 16 deep. The steps that they have made do not count.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn sequential<'a>(schedules: impl IntoIterator<Item = &'a LrSchedule>, milestones: &[u64]) -> Result<Self> {
        let (list, at) = (pointers(schedules), all_steps("a milestone", milestones)?);
        // SAFETY: the schedules and milestones are borrowed for the call.
        made(|out| check(unsafe { sys::tsr_lr_sequential(list.as_ptr(), list.len(), at.as_ptr(), at.len(), out) }))
    }

    /// Several schedules at once (PyTorch's ChainedScheduler): each takes the rate of the previous one as its `base_lr`,
    /// so factors multiply. One that sets the rate whatever `base_lr` is can only be the first.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn chained<'a>(schedules: impl IntoIterator<Item = &'a LrSchedule>) -> Result<Self> {
        let list = pointers(schedules);
        // SAFETY: the schedules are borrowed for the call.
        made(|out| check(unsafe { sys::tsr_lr_chained(list.as_ptr(), list.len(), out) }))
    }

    pub(crate) fn inner(&self) -> &Rc<LrScheduleInner> {
        &self.inner
    }

    /// The learning rate of a step. It depends on nothing else and changes nothing.
    ///
    /// # Errors
    /// `InvalidArgument`: an argument is out of range, or the rate is not finite at this step.
    pub fn lr_at(&self, step: u64, base_lr: f64) -> Result<f64> {
        let mut lr = 0.0;
        let step = steps("step", step)?;
        // SAFETY: the handle is alive and used by this thread alone; so in every method below.
        check(unsafe { sys::tsr_lr_schedule_lr_at(self.inner.as_ptr(), step, base_lr, &mut lr) })?;
        Ok(lr)
    }

    /// The momentum of a step: that of SGD, or the first beta of Adam and AdamW. None if the schedule leaves it unchanged.
    ///
    /// # Errors
    /// `InvalidArgument`: the step is out of range, or the momentum has grown to 1.
    pub fn momentum_at(&self, step: u64) -> Result<Option<f64>> {
        let mut momentum = 0.0;
        let step = steps("step", step)?;
        check(unsafe { sys::tsr_lr_schedule_momentum_at(self.inner.as_ptr(), step, &mut momentum) })?;
        Ok(Some(momentum).filter(|value| !value.is_nan()))
    }

    /// Sets an optimizer from now on: its learning rate, whose value so far becomes its base rate, and its momentum if
    /// the schedule has one. Attach it before a checkpoint is loaded. The schedule does not keep it alive.
    ///
    /// # Errors
    /// `InvalidState`: it is attached already, or its gradients are being reduced; `InvalidArgument`: it has no momentum,
    /// but the schedule sets one.
    pub fn attach(&mut self, optimizer: &mut Optimizer<'_>) -> Result<()> {
        check(unsafe { sys::tsr_lr_schedule_attach(self.inner.as_ptr(), optimizer.inner().as_ptr()) })
    }

    /// Moves on to the next step and sets the attached optimizers. Call it after their step, if it was not skipped.
    ///
    /// # Errors
    /// `InvalidArgument`: a value is out of range; `InvalidState`: gradients of an optimizer that steps in backward are
    /// being reduced. The step is then unchanged, and the call can be repeated.
    pub fn step(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_lr_schedule_step(self.inner.as_ptr()) })
    }

    /// The number of steps made, including those before a loaded checkpoint: the step that the optimizers are set for.
    ///
    /// # Errors
    /// None in practice.
    pub fn steps(&self) -> Result<u64> {
        let mut steps = 0;
        check(unsafe { sys::tsr_lr_schedule_steps(self.inner.as_ptr(), &mut steps) })?;
        Ok(u64::try_from(steps).unwrap_or(0))
    }

    /// Goes to a step and sets the attached optimizers.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn set_steps(&mut self, value: u64) -> Result<()> {
        let value = steps("steps", value)?;
        check(unsafe { sys::tsr_lr_schedule_set_steps(self.inner.as_ptr(), value) })
    }
}

fn pointers<'a>(schedules: impl IntoIterator<Item = &'a LrSchedule>) -> Vec<*const sys::tsr_lr_schedule> {
    schedules.into_iter().map(|each| each.inner.as_ptr().cast_const()).collect()
}

impl fmt::Debug for LrSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LrSchedule").field("steps", &self.steps().ok()).finish()
    }
}
