//! Fully sharded data-parallel training.

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use tessera_sys as sys;

use crate::choices::Creation;
use crate::comm::{on_cpu, Borrowed, Comm, CudaTensor};
use crate::element::{DType, Element, ReduceOp};
use crate::error::{check, Code, Error, Result};
use crate::layout::Layout;
use crate::params::{GradientOf, Group, Params, RawParams};
use crate::raw::{self, created};
use crate::settings::{fsdp_setters, fsdp_unit_setters, FsdpSettings, FsdpUnitSettings};
use crate::tensor::{slice, Held, Tensor, Use, View, ViewMut};
use crate::tp::{Handle, TensorParallel};

/// Parameters that are unsharded together, such as a layer. [`Params`] convert to one.
///
/// ```
/// use tessera::{params, FsdpUnit};
/// let unit = FsdpUnit::new(params!["w" => (vec![0.1f32; 64], [8, 8]), "scale" => (vec![1.0f32], [1])])
///     .frozen(["scale"])
///     .reshard_after_forward(false);
/// ```
#[derive(Debug, Default)]
pub struct FsdpUnit {
    params: Params,
    frozen: Vec<String>,
    settings: FsdpUnitSettings,
}

impl FsdpUnit {
    /// A unit of these parameters, all trained. They must be floating-point tensors with at least one dimension, and
    /// are sharded by rows (see also [`FsdpUnit::flat`]); [`Tensor::deferred`] ones get their values later. All of a
    /// model are on the CPU, or all on the communicator's CUDA device: [`CudaTensor`]s, [`Tensor::deferred_on`].
    pub fn new(params: Params) -> Self {
        FsdpUnit { params, ..Self::default() }
    }

    /// Freezes parameters, which then have no gradient, by their given names.
    #[must_use]
    pub fn frozen<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.frozen.extend(names.into_iter().map(Into::into));
        self
    }

    /// Whether the parameters are sharded again between forward and backward. The default is `true`; staying unsharded
    /// takes more memory and less communication.
    #[must_use]
    pub fn reshard_after_forward(mut self, value: bool) -> Self {
        self.settings.reshard_after_forward = Some(usize::from(value));
        self
    }

    /// Keeps the unit from forward to backward in groups of `ranks` consecutive ranks, which must divide the number of
    /// ranks that it is sharded over: unsharded on each host if a group fits on one, else a part on each rank.
    #[must_use]
    pub fn keep_among(mut self, ranks: usize) -> Self {
        self.settings.reshard_after_forward = Some(ranks);
        self
    }

    fsdp_unit_setters!();
}

impl From<Params> for FsdpUnit {
    fn from(params: Params) -> Self {
        Self::new(params)
    }
}

/// Named units in the order of registration; [`units!`](crate::units) writes them as a table.
#[derive(Debug, Default)]
pub struct Units {
    items: Vec<(String, FsdpUnit)>,
}

impl Units {
    /// No units.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a unit.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, unit: impl Into<FsdpUnit>) -> Self {
        self.items.push((name.into(), unit.into()));
        self
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

/// [`Units`] as a table of `name => params![...]`, or `name => FsdpUnit`.
///
/// ```
/// use tessera::{params, units};
/// let units = units![
///     "fc1" => params!["w1" => (vec![0.1f32; 40], [8, 5]), "b1" => (vec![0.0f32; 8], [8])],
///     "fc2" => params!["w2" => (vec![0.1f32; 8], [8])],
/// ];
/// assert_eq!(units.len(), 2);
/// ```
#[macro_export]
macro_rules! units {
    ($($name:expr => $unit:expr),* $(,)?) => {
        $crate::Units::new()$(.with($name, $unit))*
    };
}

/// Settings of an [`Fsdp`], the same on every rank. Settings that are not set have the library's defaults.
#[derive(Clone, Debug, Default)]
pub struct FsdpOptions {
    settings: FsdpSettings,
}

impl FsdpOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    fsdp_setters!();
}

/// A model of which each rank holds a shard of every parameter, its gradient and the optimizer's state.
///
/// The parameters are grouped into units, such as layers. A unit's parameters are unsharded, in one copy that the ranks
/// of a host share, while a [`Forward`] or [`Backward`] of it is alive; in between, each rank keeps only its rows. All
/// ranks enter the same units in the same order. Parameters are numbered in order over all units.
///
/// The compiler ensures that no view outlives its data: unsharded parameters end with their guard, and while a guard is
/// alive shards cannot be written and the step can neither end nor be abandoned. Guards of different units may be alive
/// at the same time, for example one around the others for parameters that several layers share.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, units, AdamW, Comm, Fsdp};
/// let comm = Comm::from_env()?;
/// let mut fsdp = Fsdp::new(
///     &comm,
///     units![
///         "fc1" => params!["w1" => (vec![1.0f32; 6], [3, 2])],
///         "fc2" => params!["w2" => (vec![1.0f32; 3], [3])],
///     ],
/// )?;
/// let mut opt = AdamW::new(&mut fsdp).lr(1e-3).build()?;
/// for _ in 0..3 {
///     for unit in 0..fsdp.unit_count() {
///         let layer = fsdp.forward(unit)?;
///         for i in layer.indices() {
///             let _computed = layer.param(i)?.iter().sum::<f32>();
///         }
///         layer.done()?;
///     }
///     for unit in (0..fsdp.unit_count()).rev() {
///         let layer = fsdp.backward(unit)?;
///         for i in layer.indices() {
///             layer.grad_mut(i)?.fill(1.0);
///         }
///         layer.ready()?;
///     }
///     fsdp.wait()?;
///     opt.step()?;
/// }
/// assert!(fsdp.shard(0)?[0] < 1.0);
/// # Ok(()) }
/// ```
pub struct Fsdp<'c> {
    inner: Rc<FsdpInner>,
    _comm: Borrowed<'c>,
}

/// The phase of a unit in the current step. A program, an optimizer or a load may write shards while all units are
/// `Sharded`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnitPhase {
    /// Each rank has its rows.
    Sharded,
    /// It is being unsharded.
    OnItsWay,
    /// Its parameters are unsharded.
    Whole,
    /// It is unsharded, and its gradients are being written.
    Backward,
    /// It is sharded, and its gradients are being reduced until [`Fsdp::wait`].
    Reducing,
}

impl UnitPhase {
    fn from_raw(phase: i32) -> Option<Self> {
        Some(match phase {
            sys::TSR_FSDP_SHARDED => UnitPhase::Sharded,
            sys::TSR_FSDP_ON_ITS_WAY => UnitPhase::OnItsWay,
            sys::TSR_FSDP_WHOLE => UnitPhase::Whole,
            sys::TSR_FSDP_BACKWARD => UnitPhase::Backward,
            sys::TSR_FSDP_REDUCING => UnitPhase::Reducing,
            _ => return None,
        })
    }
}

/// As the library numbers them.
struct Unit {
    name: String,
    indices: Range<usize>,
    /// A guard of it is alive, or a call that creates one is running.
    lent: Cell<bool>,
    /// The gradients of its shards are lent to the library, from its backward to `wait`.
    grads_lent: Cell<bool>,
}

struct Param {
    name: String,
    shape: Vec<usize>,
    unit: usize,
    /// Both point into the handle's memory, and are dropped after it.
    shard: Tensor,
    /// None if it is not trained.
    grad: Option<Tensor>,
}

/// Shared with the optimizers and states whose C side points at it.
pub struct FsdpInner {
    handle: NonNull<sys::tsr_fsdp>,
    /// Those that are trained.
    pub(crate) trained: Group,
    params: Vec<Param>,
    units: Vec<Unit>,
    _tp: Option<Arc<Handle>>, // dropped after the handle
}

impl fmt::Debug for FsdpInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.named_shards()).finish()
    }
}

impl Drop for FsdpInner {
    fn drop(&mut self) {
        // SAFETY: this was the last owner: guards, optimizers and states that used it are gone.
        unsafe { sys::tsr_fsdp_destroy(self.handle.as_ptr()) }
    }
}

impl Param {
    fn grad(&self) -> Result<&Tensor> {
        self.grad.as_ref().ok_or_else(|| self.is_not_trained())
    }

    fn is_not_trained(&self) -> Error {
        Error::state(format!("parameter \"{}\" is frozen and has no gradient", self.name))
    }
}

impl FsdpInner {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_fsdp {
        self.handle.as_ptr()
    }

    pub(crate) fn named_shards(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.params.iter().map(|param| (param.name.as_str(), &param.shard))
    }

    /// The library's units, parameters and views of shards.
    fn read(&mut self) -> Result<()> {
        let (mut units, mut params) = (0, 0);
        // SAFETY: the handle is alive.
        unsafe {
            check(sys::tsr_fsdp_unit_count(self.as_ptr(), &mut units))?;
            check(sys::tsr_fsdp_param_count(self.as_ptr(), &mut params))?;
        }
        for index in 0..params {
            let param = self.read_param(index)?;
            if let Some(grad) = &param.grad {
                self.trained.params.push((param.name.clone(), param.shard.clone()));
                self.trained.grads.push(grad.clone());
            }
            self.params.push(param);
        }
        let mut end = 0;
        for unit in 0..units {
            let begin = end;
            end += self.params[begin..].iter().take_while(|param| param.unit == unit).count();
            let mut name = ptr::null();
            // SAFETY: the name lives as long as the handle.
            let name = unsafe {
                check(sys::tsr_fsdp_unit_name(self.as_ptr(), unit, &mut name))?;
                raw::text(name)
            };
            let (lent, grads_lent) = (Cell::new(false), Cell::new(false));
            self.units.push(Unit { name, indices: begin..end, lent, grads_lent });
        }
        Ok(())
    }

    fn read_param(&self, index: usize) -> Result<Param> {
        let (mut unit, mut trained) = (0, 0);
        // SAFETY: plain structs of which zero is a value; what is read of them lives as long as the handle, whose only owner
        // also owns the tensors.
        unsafe {
            let (mut whole, mut shard): (sys::tsr_param, sys::tsr_param) = (std::mem::zeroed(), std::mem::zeroed());
            check(sys::tsr_fsdp_param(self.as_ptr(), index, &mut whole, &mut unit, &mut trained))?;
            check(sys::tsr_fsdp_shard(self.as_ptr(), index, &mut shard))?;
            let mut grad = None;
            if trained != 0 {
                let mut view: sys::tsr_tensor = std::mem::zeroed();
                check(sys::tsr_fsdp_shard_grad(self.as_ptr(), index, &mut view))?;
                grad = Some(Tensor::borrowed(&view)?);
            }
            let name = raw::text(whole.name);
            let sizes = slice(whole.tensor.shape, usize::try_from(whole.tensor.ndim).unwrap_or(0));
            let shape = sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).collect();
            Ok(Param { name, shape, unit, shard: Tensor::borrowed(&shard.tensor)?, grad })
        }
    }

    fn param(&self, index: usize) -> Result<&Param> {
        let no_such =
            || Error::argument(format!("parameter {index} does not exist; the model has {}", self.params.len()));
        self.params.get(index).ok_or_else(no_such)
    }

    fn unit(&self, unit: usize) -> Result<&Unit> {
        let no_such = || Error::argument(format!("unit {unit} does not exist; the model has {}", self.units.len()));
        self.units.get(unit).ok_or_else(no_such)
    }

    fn phase(&self, unit: usize) -> Result<UnitPhase> {
        let mut phase = 0;
        // SAFETY: the handle is alive and used by this thread alone; so in every method below.
        check(unsafe { sys::tsr_fsdp_unit_phase(self.as_ptr(), unit, &mut phase) })?;
        UnitPhase::from_raw(phase).ok_or_else(|| Error::state(format!("unit {unit} is in the unknown phase {phase}")))
    }

    /// Unshards a unit with `begin`, for a guard.
    fn whole(&self, unit: usize, begin: unsafe fn(*mut sys::tsr_fsdp, usize) -> sys::tsr_status) -> Result<Lent<'_>> {
        let info = self.unit(unit)?;
        if info.lent.replace(true) {
            return Err(Error::state(format!(
                "unit \"{}\" is in use: a guard of its forward, backward or unsharded state is alive; end it first",
                info.name
            )));
        }
        // It gives the unit back, unless `open`.
        let mut lent = Lent { inner: self, unit, params: Vec::new(), open: false };
        self.check_readable()?;
        // SAFETY: nobody writes shards.
        check(unsafe { begin(self.as_ptr(), unit) })?;
        // SAFETY: the memory is there until the unit is sharded again, before which the guard ends.
        let whole = |index| unsafe { Seen::new(self, index, sys::tsr_fsdp_whole) };
        lent.params = info.indices.clone().map(whole).collect::<Result<_>>()?;
        lent.open = true;
        Ok(lent)
    }

    /// Whether the library may currently read shards in the background.
    fn check_readable(&self) -> Result<()> {
        self.named_shards().try_for_each(|(name, shard)| shard.check_readable(&name))
    }

    fn grads_of<'a>(&'a self, unit: &Unit) -> impl Iterator<Item = (GradientOf<'a>, &'a Tensor)> {
        let params = &self.params[unit.indices.clone()];
        params.iter().filter_map(|param| param.grad.as_ref().map(|grad| (GradientOf(&param.name), grad)))
    }

    /// Lends the gradients of a unit's shards to the library, unless they already are. Returns whether it did.
    fn lend_grads(&self, unit: &Unit) -> Result<bool> {
        if unit.grads_lent.get() {
            return Ok(false);
        }
        self.grads_of(unit).try_for_each(|(name, grad)| grad.check_writable(&name))?;
        self.grads_of(unit).try_for_each(|(name, grad)| grad.lend(&name))?;
        unit.grads_lent.set(true);
        Ok(true)
    }

    fn take_back_grads(&self, unit: &Unit) {
        if unit.grads_lent.replace(false) {
            self.grads_of(unit).for_each(|(_, grad)| grad.take_back());
        }
    }

    /// The step has ended. No guard is alive, because the model was not borrowed, but one may have been forgotten.
    fn end_step(&self) {
        for unit in &self.units {
            unit.lent.set(false);
            self.take_back_grads(unit);
        }
    }
}

impl<'c> Fsdp<'c> {
    /// Registers a model, checks that all ranks registered the same, and shards it. The given tensors are read here and
    /// not used later. Collective.
    ///
    /// # Errors
    /// `Mismatch`: the ranks' models differ, and the message names the first difference; `InvalidArgument`: a length
    /// does not fit its shape, a dtype is not floating-point, a parameter has no dimension, the name of a unit or a
    /// parameter occurs twice; `NotFound`: a frozen parameter is not in its unit; `InvalidState`: a mutable view of a
    /// tensor is alive; `Timeout`, `Aborted`, `PeerLost`, `NoMemory`.
    pub fn new(comm: &'c Comm, units: Units) -> Result<Self> {
        Self::with_options(comm, units, &FsdpOptions::new())
    }

    /// [`Fsdp::new`] with settings.
    ///
    /// # Errors
    /// The same errors.
    pub fn with_options(comm: &'c Comm, units: Units, options: &FsdpOptions) -> Result<Self> {
        Self::create(comm, units, options, None)
    }

    /// Shards the slices of a tensor-parallel model: the units have its slices
    /// ([`slice_tensor`](TensorParallel::slice_tensor)) under their names. `comm` has the ranks with the same slices and
    /// other data, such as a mesh's "dp". Layouts, optimizers, norms and states are then those of the full model, and
    /// [`sum_grads`](TensorParallel::sum_grads) is not needed. Collective.
    ///
    /// # Errors
    /// As [`Fsdp::new`]; `InvalidArgument`: a parameter is not a slice of `tp`, or the ranks of `comm` do not have the
    /// same slices.
    pub fn over_slices(comm: &'c Comm, tp: &TensorParallel<'c>, units: Units, options: &FsdpOptions) -> Result<Self> {
        Self::create(comm, units, options, Some(tp))
    }

    fn create(comm: &'c Comm, units: Units, options: &FsdpOptions, tp: Option<&TensorParallel<'c>>) -> Result<Self> {
        let mut tensors: Vec<(String, Tensor)> = Vec::new();
        let mut trained: Vec<i32> = Vec::new();
        let mut given = Vec::new();
        comm.or_refuse(Creation::Model, || {
            for (name, unit) in units.items {
                let params = unit.params.into_items()?;
                if let Some(unknown) =
                    unit.frozen.iter().find(|frozen| !params.iter().any(|(param, _)| param == *frozen))
                {
                    return Err(Error::new(
                        Code::NotFound,
                        format!("unit \"{name}\" has no parameter \"{unknown}\" to freeze"),
                    ));
                }
                let begin = tensors.len();
                trained.extend(params.iter().map(|(param, _)| i32::from(!unit.frozen.contains(param))));
                tensors.extend(params);
                let n = tensors.len() - begin;
                given.push((
                    begin..tensors.len(),
                    unit.settings.with_raw(|raw| Ok(sys::tsr_fsdp_unit { n, ..*raw }))?,
                    raw::c_string("the unit", &name)?,
                ));
            }
            Ok(())
        })?;
        let values = tensors.iter().filter(|(_, tensor)| !tensor.is_deferred());
        let held =
            comm.or_refuse(Creation::Model, || Held::new(values.map(|(name, tensor)| (name, tensor)), Use::Reads))?;
        let raw_params = comm.or_refuse(Creation::Model, || RawParams::new(&tensors))?;
        let raw_units: Vec<_> = given
            .iter()
            .map(|(indices, unit, name)| sys::tsr_fsdp_unit {
                name: name.as_ptr(),
                params: raw_params.as_slice()[indices.clone()].as_ptr(),
                trained: trained[indices.clone()].as_ptr(),
                ..*unit
            })
            .collect();
        let mut handle = ptr::null_mut();
        comm.creating(Creation::Model, |reached| {
            options.settings.with_raw(|raw| {
                raw::set(&mut raw.tp, tp.map(|tp| tp.handle().as_ptr()));
                let (comm, units, n) = (comm.as_ptr(), raw_units.as_ptr(), raw_units.len());
                reached.set(true);
                // SAFETY: all is borrowed for the call, but the communicators, which the new object borrows, and the
                // tensor-parallel model, which it keeps.
                check(unsafe { sys::tsr_fsdp_create(comm, units, n, raw, &mut handle) })
            })
        })?;
        drop(held);
        let mut inner = FsdpInner {
            handle: created(handle)?,
            trained: Group { params: Vec::new(), grads: Vec::new() },
            params: Vec::new(),
            units: Vec::new(),
            _tp: tp.map(|tp| Arc::clone(tp.handle())),
        };
        inner.read()?;
        Ok(Fsdp { inner: Rc::new(inner), _comm: Borrowed::new() })
    }

    pub(crate) fn inner(&self) -> &Rc<FsdpInner> {
        &self.inner
    }

    /// The number of parameters, over all units.
    pub fn len(&self) -> usize {
        self.inner.params.len()
    }

    /// Whether there are no parameters; always false.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The index of the parameter `name`.
    pub fn index(&self, name: &str) -> Option<usize> {
        self.inner.params.iter().position(|param| param.name == name)
    }

    /// The name of parameter `index`; `None` beyond the last.
    pub fn name(&self, index: usize) -> Option<&str> {
        self.inner.params.get(index).map(|param| param.name.as_str())
    }

    /// The full shape of parameter `index`; `None` beyond the last.
    pub fn shape(&self, index: usize) -> Option<&[usize]> {
        self.inner.params.get(index).map(|param| param.shape.as_slice())
    }

    /// Whether parameter `index` has a gradient; false beyond the last.
    pub fn is_trained(&self, index: usize) -> bool {
        self.inner.params.get(index).is_some_and(|param| param.grad.is_some())
    }

    /// The number of units.
    pub fn unit_count(&self) -> usize {
        self.inner.units.len()
    }

    /// The index of the unit `name`.
    pub fn unit(&self, name: &str) -> Option<usize> {
        self.inner.units.iter().position(|unit| unit.name == name)
    }

    /// The name of unit `unit`; `None` beyond the last.
    pub fn unit_name(&self, unit: usize) -> Option<&str> {
        self.inner.units.get(unit).map(|unit| unit.name.as_str())
    }

    /// The parameters of unit `unit`; `None` beyond the last.
    pub fn indices(&self, unit: usize) -> Option<Range<usize>> {
        self.inner.units.get(unit).map(|unit| unit.indices.clone())
    }

    /// The unit of parameter `index`; `None` beyond the last.
    pub fn unit_of(&self, index: usize) -> Option<usize> {
        self.inner.params.get(index).map(|param| param.unit)
    }

    /// The phase of unit `unit` in the current step.
    ///
    /// # Errors
    /// `InvalidArgument`: the unit does not exist.
    pub fn phase(&self, unit: usize) -> Result<UnitPhase> {
        self.inner.phase(unit)
    }

    /// Whether any rank had a gradient of parameter `index` in the last reduced step. If no rank had one (with
    /// accumulation: since gradients were set to zero), its gradients are zero, and optimizers leave the parameter, its
    /// moments and its step count unchanged. False before the first step, and for a frozen parameter.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist.
    pub fn used(&self, index: usize) -> Result<bool> {
        let mut used = 0;
        check(unsafe { sys::tsr_fsdp_used(self.inner.as_ptr(), index, &mut used) })?;
        Ok(used != 0)
    }

    /// Which rank holds which rows of parameter `index`.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist; `NoMemory`.
    pub fn layout(&self, index: usize) -> Result<Layout> {
        let mut handle = ptr::null_mut();
        check(unsafe { sys::tsr_fsdp_layout(self.inner.as_ptr(), index, &mut handle) })?;
        Ok(Layout::from_raw(created(handle)?, self.inner.params[index].shape.len()))
    }

    /// This rank's rows of parameter `index` (possibly none), an `f32` tensor, to read.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist, or it is not `f32`.
    pub fn shard(&self, index: usize) -> Result<View<'_, f32>> {
        self.shard_as(index)
    }

    /// [`Self::shard`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn shard_as<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
        self.inner.param(index)?.shard.view()
    }

    /// This rank's rows of parameter `index`, an `f32` tensor, to write between steps.
    ///
    /// # Errors
    /// As [`Self::shard`], and `InvalidState`: the unit is unsharded or being unsharded; [`Self::reshard`] it.
    pub fn shard_mut(&mut self, index: usize) -> Result<ViewMut<'_, f32>> {
        self.shard_mut_as(index)
    }

    /// [`Self::shard_mut`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn shard_mut_as<T: Element>(&mut self, index: usize) -> Result<ViewMut<'_, T>> {
        let param = self.inner.param(index)?;
        match self.phase(param.unit)? {
            UnitPhase::Sharded | UnitPhase::Reducing => param.shard.view_mut(),
            UnitPhase::OnItsWay | UnitPhase::Whole | UnitPhase::Backward => Err(Error::state(format!(
                "the shards of unit \"{}\" cannot be written unless it is sharded; call wait() or reshard() first",
                self.inner.units[param.unit].name
            ))),
        }
    }

    /// The gradient of this rank's rows of parameter `index`, an `f32` tensor, to read; [`Self::wait`] reduces it.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist, or it is not `f32`; `InvalidState`: it is frozen, or its unit's
    /// backward has begun in this step.
    pub fn shard_grad(&self, index: usize) -> Result<View<'_, f32>> {
        self.shard_grad_as(index)
    }

    /// [`Self::shard_grad`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn shard_grad_as<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
        self.inner.param(index)?.grad()?.view()
    }

    /// The gradient of this rank's rows of parameter `index`, an `f32` tensor, to write, for example to clip it.
    ///
    /// # Errors
    /// As [`Self::shard_grad`], and while any view of it is alive.
    pub fn shard_grad_mut(&self, index: usize) -> Result<ViewMut<'_, f32>> {
        self.shard_grad_mut_as(index)
    }

    /// [`Self::shard_grad_mut`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn shard_grad_mut_as<T: Element>(&self, index: usize) -> Result<ViewMut<'_, T>> {
        self.inner.param(index)?.grad()?.view_mut()
    }

    /// This rank's rows of parameter `index` where they are on a device. They stay there as long as the model and its
    /// optimizers; do not write them while the unit is unsharded.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist, or it is on the CPU.
    pub fn cuda_shard(&self, index: usize) -> Result<CudaTensor> {
        let param = self.inner.param(index)?;
        param.shard.cuda().ok_or_else(|| on_cpu(&format_args!("shard of {}", param.name), "shard"))
    }

    /// The gradient of this rank's rows of parameter `index` where it is on a device.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist, or it is on the CPU; `InvalidState`: it is frozen.
    pub fn cuda_shard_grad(&self, index: usize) -> Result<CudaTensor> {
        let param = self.inner.param(index)?;
        param.grad()?.cuda().ok_or_else(|| on_cpu(&GradientOf(&param.name), "shard_grad"))
    }

    /// Names the CUDA stream on which the trainer computes and updates shards. For parameters on a device
    /// ([`CudaTensor`]s) everything is in its order: the beginning of a pass and [`wait`](Self::wait) make this stream
    /// wait for the device, not the caller. Reductions take what this stream has written at
    /// [`ready`](Backward::ready). A new stream continues after what the previous one had.
    ///
    /// # Errors
    /// `InvalidArgument`: the stream is of another device, or the parameters are on the CPU; `InvalidState`: a unit is
    /// not sharded, or its gradients are being reduced.
    ///
    /// # Safety
    /// `stream` is a CUDA stream (`cudaStream_t`), or null for the default one, as at first. It exists until another one is
    /// set or the model and its optimizers are dropped.
    pub unsafe fn set_stream(&mut self, stream: *mut c_void) -> Result<()> {
        check(unsafe { sys::tsr_fsdp_set_stream(self.inner.as_ptr(), stream) })
    }

    /// Begins a unit's forward: returns when its parameters are unsharded, while the next units are being unsharded.
    /// The guard gives access to them and ends the forward. Collective.
    ///
    /// # Errors
    /// `InvalidState`: in the middle of a backward, a guard of the unit is alive, or a mutable view of a shard is;
    /// `InvalidArgument`: the unit does not exist; `Mismatch`: another rank unshards a different unit; `Timeout`,
    /// `Aborted`, `PeerLost`, `NoMemory`. `Interrupted`: call it again.
    pub fn forward(&self, unit: usize) -> Result<Forward<'_>> {
        Ok(Forward(self.inner.whole(unit, sys::tsr_fsdp_forward)?))
    }

    /// Begins a unit's backward: returns when its parameters are unsharded and there is memory for its gradients. The
    /// guard gives access to both. A unit that a step uses more than once has one backward after all uses or one for
    /// each; their gradients are added up. Collective.
    ///
    /// # Errors
    /// As [`Self::forward`], and `InvalidState`: a view of the gradient of one of its shards is alive.
    pub fn backward(&self, unit: usize) -> Result<Backward<'_>> {
        let inner = &*self.inner;
        let info = inner.unit(unit)?;
        let newly = inner.lend_grads(info)?; // those of a backward that goes on are the library's already
        let lent = inner.whole(unit, sys::tsr_fsdp_backward).inspect_err(|_| {
            if newly {
                inner.take_back_grads(info); // nothing reduces into them before `ready`
            }
        })?;
        let grads = inner.params[info.indices.clone()]
            .iter()
            .zip(info.indices.clone())
            .map(|(param, index)| {
                if param.grad.is_none() {
                    return Ok(None);
                }
                // SAFETY: the memory is there until `ready`, with which the guard ends.
                unsafe { Seen::new(inner, index, sys::tsr_fsdp_grad) }.map(Some)
            })
            .collect::<Result<_>>()?;
        Ok(Backward { lent, grads })
    }

    /// Ends the backward pass: returns when the gradients of all shards are the average (or sum) over the ranks and
    /// every unit is sharded. Collective.
    ///
    /// # Errors
    /// `InvalidState`: units were never marked ready; the message names them. Complete the step and wait again.
    /// `Mismatch`, `Timeout`, `Aborted`, `PeerLost`: the gradients stay inaccessible. `Interrupted`: call it again.
    pub fn wait(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_fsdp_wait(self.inner.as_ptr()) })?;
        self.inner.end_step();
        Ok(())
    }

    /// Abandons the current step at any point: every unit is sharded, and every gradient, including accumulated ones,
    /// is zero. This also cleans up after an error or a panic, such as a [`Backward`] that was dropped before it was
    /// ready. Collective: all ranks must call it after the same calls of the step, so ranks without an error must first
    /// learn of it, for example by another collective.
    ///
    /// ```
    /// # fn main() -> tessera::Result<()> {
    /// use tessera::{params, units, Comm, Fsdp, ReduceOp};
    /// let comm = Comm::from_env()?;
    /// let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![1.0f32; 6], [3, 2])]])?;
    /// let layer = fsdp.backward(0)?;
    /// layer.grad_mut(0)?.fill(0.5); // what the backward pass makes
    /// let failed = layer.grad_mut(0)?.iter().any(|grad| grad.is_nan());
    /// let mut failures = [f32::from(u8::from(failed))];
    /// comm.all_reduce(&mut failures, ReduceOp::Sum)?;
    /// if failures[0] == 0.0 {
    ///     layer.ready()?;
    ///     fsdp.wait()?;
    /// } else {
    ///     drop(layer);
    ///     fsdp.abandon()?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidState`: a view of a gradient is alive, or another call uses it; `Mismatch`, `Timeout`, `Aborted`, `PeerLost`,
    /// `NoMemory`. `Interrupted`: call it again.
    pub fn abandon(&mut self) -> Result<()> {
        let inner = &*self.inner;
        let free = inner.units.iter().filter(|unit| !unit.grads_lent.get());
        let _grads = Held::new(free.flat_map(|unit| inner.grads_of(unit)), Use::Writes)?;
        check(unsafe { sys::tsr_fsdp_abandon(inner.as_ptr()) })?;
        inner.end_step();
        Ok(())
    }

    /// Begins to unshard a unit in the background. Does nothing if it is unsharded or being unsharded. Collective.
    ///
    /// # Errors
    /// `InvalidArgument`: the unit does not exist; `InvalidState`: a mutable view of a shard is alive; `Aborted`.
    pub fn unshard(&self, unit: usize) -> Result<()> {
        self.inner.check_readable()?;
        check(unsafe { sys::tsr_fsdp_unshard(self.inner.as_ptr(), unit) })
    }

    /// Waits until a unit, for which [`Self::unshard`] was called, is unsharded. The guard gives access to its
    /// parameters and shards it again. Collective.
    ///
    /// # Errors
    /// `InvalidState`: [`Self::unshard`] was not called, or a guard of the unit is alive; `InvalidArgument`: the unit
    /// does not exist; `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, `NoMemory`. `Interrupted`: call it again.
    pub fn whole(&self, unit: usize) -> Result<Whole<'_>> {
        Ok(Whole(self.inner.whole(unit, sys::tsr_fsdp_await)?))
    }

    /// Shards a unit that is unsharded, or being unsharded, without a guard: one that stays unsharded after a forward,
    /// or was prefetched. Waits for one that is being unsharded. Collective.
    ///
    /// # Errors
    /// `InvalidArgument`: the unit does not exist; `InvalidState`: its backward has begun; `Mismatch`, `Timeout`,
    /// `Aborted`, `PeerLost`, `NoMemory`. `Interrupted`: call it again.
    pub fn reshard(&mut self, unit: usize) -> Result<()> {
        check(unsafe { sys::tsr_fsdp_reshard(self.inner.as_ptr(), unit) })?;
        self.inner.units[unit].lent.set(false); // a forgotten guard
        Ok(())
    }

    /// Sets whether the following backwards reduce. If not, each rank accumulates unsharded gradients, which need
    /// memory, until the next backward with synchronisation reduces their sum; they are initially zero, and the trainer
    /// adds to them. The same on every rank; initially `true`.
    ///
    /// # Errors
    /// `InvalidState`: in the middle of a backward.
    pub fn set_sync(&mut self, sync: bool) -> Result<()> {
        check(unsafe { sys::tsr_fsdp_set_sync(self.inner.as_ptr(), i32::from(sync)) })
    }

    /// Sets whether the following backwards add to the gradients of the shards instead of replacing them; initially
    /// `false`.
    ///
    /// # Errors
    /// `InvalidState`: in the middle of a backward.
    pub fn set_accumulate(&mut self, accumulate: bool) -> Result<()> {
        check(unsafe { sys::tsr_fsdp_set_accumulate(self.inner.as_ptr(), i32::from(accumulate)) })
    }

    /// Sets whether the following backwards also reduce over replicas ([`FsdpOptions::shard_ranks`]). If not, the sums
    /// over the ranks of each replica (which may be all ranks) are kept and accumulated until the next backward that
    /// does; the shards' gradients are unchanged. The same on every rank; initially `true`.
    ///
    /// # Errors
    /// `InvalidState`: in the middle of a backward.
    pub fn set_all_reduce(&mut self, all_reduce: bool) -> Result<()> {
        check(unsafe { sys::tsr_fsdp_set_all_reduce(self.inner.as_ptr(), i32::from(all_reduce)) })
    }

    /// Sets whether a unit frees its memory after its following backwards. If not, it keeps its memory, and the next
    /// forward reuses its contents unless some rank changed a shard since. Nothing is then sent between hosts, which
    /// speeds up steps that accumulate gradients. The same on every rank; initially `true`.
    ///
    /// # Errors
    /// `InvalidArgument`: the unit does not exist; `InvalidState`: in the middle of a backward.
    pub fn set_reshard_after_backward(&mut self, unit: usize, reshard: bool) -> Result<()> {
        check(unsafe { sys::tsr_fsdp_set_reshard_after_backward(self.inner.as_ptr(), unit, i32::from(reshard)) })
    }

    /// Sets the gradients of the shards to zero and drops accumulated unsharded gradients.
    ///
    /// # Errors
    /// `InvalidState`: units are unsharded, or gradients are being reduced; `Aborted`.
    pub fn zero_grad(&mut self) -> Result<()> {
        let _grads = Held::new(self.inner.trained.named_grads(), Use::Writes)?;
        check(unsafe { sys::tsr_fsdp_zero_grad(self.inner.as_ptr()) })
    }
}

impl fmt::Debug for Fsdp<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// A tensor of an unsharded unit.
struct Seen {
    tensor: Tensor,
    /// If it is on a device.
    cuda: Option<CudaTensor>,
}

impl Seen {
    /// # Safety
    /// What `get` gives stays as long as this is used.
    unsafe fn new(
        inner: &FsdpInner,
        index: usize,
        get: unsafe fn(*mut sys::tsr_fsdp, usize, *mut sys::tsr_tensor) -> sys::tsr_status,
    ) -> Result<Self> {
        // SAFETY: a plain struct of which zero is a value; the handle is alive.
        let tensor = unsafe {
            let mut raw: sys::tsr_tensor = std::mem::zeroed();
            check(get(inner.as_ptr(), index, &mut raw))?;
            Tensor::borrowed(&raw)?
        };
        let cuda = tensor.cuda();
        Ok(Seen { tensor, cuda })
    }

    fn cuda(&self, what: &dyn fmt::Display, instead: &str) -> Result<&CudaTensor> {
        self.cuda.as_ref().ok_or_else(|| on_cpu(what, instead))
    }
}

/// An unsharded unit, for its guard.
struct Lent<'f> {
    inner: &'f FsdpInner,
    unit: usize,
    params: Vec<Seen>,
    /// Whether it must still be ended.
    open: bool,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.inner.units[self.unit].lent.set(false);
    }
}

impl Lent<'_> {
    fn info(&self) -> &Unit {
        &self.inner.units[self.unit]
    }

    /// The position of a parameter in the unit.
    fn position(&self, index: usize) -> Result<usize> {
        let Unit { name, indices, .. } = self.info();
        if indices.contains(&index) {
            Ok(index - indices.start)
        } else {
            Err(Error::argument(format!(
                "parameter {index} does not belong to unit \"{name}\", which has {} to {}",
                indices.start,
                indices.end - 1
            )))
        }
    }

    fn param<T: Element>(&self, index: usize) -> Result<&[T]> {
        let param = &self.params[self.position(index)?].tensor;
        param.check_dtype(T::DTYPE)?;
        param.check_on_cpu()?;
        // SAFETY: it is whole for as long as the guard lives, and nobody writes it meanwhile.
        Ok(unsafe { slice(param.as_raw().data.cast_const().cast(), param.len()) })
    }

    fn cuda_param(&self, index: usize) -> Result<&CudaTensor> {
        self.params[self.position(index)?].cuda(&self.inner.params[index].name, "param")
    }

    fn end(&mut self, end: unsafe fn(*mut sys::tsr_fsdp, usize) -> sys::tsr_status) -> Result<()> {
        if !std::mem::take(&mut self.open) {
            return Ok(());
        }
        // SAFETY: the handle is alive; what the guard lent is not used any longer.
        check(unsafe { end(self.inner.as_ptr(), self.unit) })
    }

    fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name).field("unit", &self.info().name).field("indices", &self.info().indices).finish()
    }
}

macro_rules! whole_accessors {
    ($($lent:tt)*) => {
        /// The unit's parameters.
        pub fn indices(&self) -> Range<usize> {
            self.$($lent)*.info().indices.clone()
        }

        /// Parameter `index`, an unsharded `f32` tensor. Read-only, because the ranks of a host share one copy.
        ///
        /// # Errors
        /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): it does not belong to this unit, or it is not
        /// `f32`.
        pub fn param(&self, index: usize) -> Result<&[f32]> {
            self.param_as(index)
        }

        /// [`Self::param`] for any dtype.
        ///
        /// # Errors
        /// The same errors.
        pub fn param_as<T: Element>(&self, index: usize) -> Result<&[T]> {
            self.$($lent)*.param(index)
        }

        /// Parameter `index`, unsharded, where it is on a device. Kernels and operations on the trainer's stream
        /// ([`Fsdp::set_stream`]) may read it, and may not write it.
        ///
        /// # Errors
        /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): it does not belong to this unit, or it is on the
        /// CPU.
        pub fn cuda_param(&self, index: usize) -> Result<&CudaTensor> {
            self.$($lent)*.cuda_param(index)
        }
    };
}

/// A unit in its forward, created by [`Fsdp::forward`]: its parameters are unsharded. Dropping it ends the forward like
/// [`done`](Self::done), which also returns errors.
#[must_use = "the forward ends when this is dropped"]
pub struct Forward<'f>(Lent<'f>);

impl Forward<'_> {
    whole_accessors!(0);

    /// Ends the forward: the parameters are sharded again, unless the unit stays unsharded until its backward.
    ///
    /// # Errors
    /// `Aborted`.
    pub fn done(mut self) -> Result<()> {
        self.0.end(sys::tsr_fsdp_forward_done)
    }
}

impl Drop for Forward<'_> {
    fn drop(&mut self) {
        let _ = self.0.end(sys::tsr_fsdp_forward_done); // the next call fails with it, too
    }
}

impl fmt::Debug for Forward<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt("Forward", f)
    }
}

/// A unit that is unsharded outside of a step, for evaluation or inspection, created by [`Fsdp::whole`]. Dropping it
/// shards the unit again like [`reshard`](Self::reshard), which also returns errors.
#[must_use = "the unit is sharded again when this is dropped"]
pub struct Whole<'f>(Lent<'f>);

impl Whole<'_> {
    whole_accessors!(0);

    /// Frees the memory of the unit.
    ///
    /// # Errors
    /// `InvalidState`: its backward has begun; `Aborted`.
    pub fn reshard(mut self) -> Result<()> {
        self.0.end(sys::tsr_fsdp_reshard)
    }
}

impl Drop for Whole<'_> {
    fn drop(&mut self) {
        let _ = self.0.end(sys::tsr_fsdp_reshard); // as for a forward
    }
}

impl fmt::Debug for Whole<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt("Whole", f)
    }
}

/// A unit in its backward, created by [`Fsdp::backward`]: its parameters are unsharded, and its gradients must be
/// written.
///
/// [`ready`](Self::ready) ends it. If it is dropped earlier, for example because of an error, the unit's backward
/// continues without the guard: the unit stays unsharded, [`Fsdp::backward`] returns another guard with the gradients
/// written so far, and [`Fsdp::wait`] names the unit. [`Fsdp::abandon`] abandons the entire step instead.
#[must_use = "ready() ends the unit's backward"]
pub struct Backward<'f> {
    lent: Lent<'f>,
    /// None for frozen parameters.
    grads: Vec<Option<Seen>>,
}

impl Backward<'_> {
    whole_accessors!(lent);

    fn grad(&self, index: usize) -> Result<&Seen> {
        let position = self.lent.position(index)?;
        self.grads[position].as_ref().ok_or_else(|| self.lent.inner.params[index].is_not_trained())
    }

    /// The unsharded gradient of parameter `index`, an `f32` tensor, to write. It is uninitialised, except without
    /// synchronisation ([`Fsdp::set_sync`]), where it holds the accumulated gradient, initially zero.
    ///
    /// # Errors
    /// `InvalidArgument`: it does not belong to this unit, or it is not `f32`; `InvalidState`: it is frozen, or a view
    /// of it is alive.
    pub fn grad_mut(&self, index: usize) -> Result<ViewMut<'_, f32>> {
        self.grad_mut_as(index)
    }

    /// [`Self::grad_mut`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn grad_mut_as<T: Element>(&self, index: usize) -> Result<ViewMut<'_, T>> {
        self.grad(index)?.tensor.view_mut()
    }

    /// The unsharded gradient of parameter `index` where it is on a device, to be written on the trainer's stream
    /// ([`Fsdp::set_stream`]) before [`Self::ready`].
    ///
    /// # Errors
    /// `InvalidArgument`: it does not belong to this unit, or it is on the CPU; `InvalidState`: it is frozen.
    pub fn cuda_grad(&self, index: usize) -> Result<&CudaTensor> {
        self.grad(index)?.cuda(&GradientOf(&self.lent.inner.params[index].name), "grad_mut")
    }

    /// Marks parameter `index` as having no gradient on this rank in this backward; it counts as zeros.
    ///
    /// # Errors
    /// As [`Self::grad_mut`].
    pub fn unused(&self, index: usize) -> Result<()> {
        self.grad(index)?.tensor.check_writable(&GradientOf(&self.lent.inner.params[index].name))?;
        check(unsafe { sys::tsr_fsdp_unused(self.lent.inner.as_ptr(), index) })
    }

    /// Ends the unit's backward, once all its gradients are written: they are reduced into the shards in the
    /// background, and its parameters are sharded again.
    ///
    /// # Errors
    /// `InvalidState`: gradients were neither written nor marked unused; the message names them, and [`Fsdp::backward`]
    /// continues the unit's backward. `Aborted`.
    pub fn ready(mut self) -> Result<()> {
        self.lent.end(sys::tsr_fsdp_grads_ready)
    }
}

/// Ensures that views of the gradients end before.
impl Drop for Backward<'_> {
    fn drop(&mut self) {}
}

impl fmt::Debug for Backward<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lent.fmt("Backward", f)
    }
}
