//! DeepSpeed's engine: a configuration makes the model, the optimizer, the loss scale and the schedule.

use std::cell::Cell;
use std::ffi::CString;
use std::fmt;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use tessera_sys as sys;

use crate::choices::Creation;
use crate::comm::{Borrowed, Comm};
use crate::element::Element;
use crate::error::{check, Error, Result};
use crate::lr_schedule::{made, LrSchedule};
use crate::optim::{Optimizer, Owns};
use crate::params::{Group, Params, RawParams};
use crate::raw::{self, created};
use crate::tensor::{Held, Tensor, Use, View, ViewMut};
use crate::value::Value;

/// A `ds_config`: its text or its file, which is JSON with comments and trailing commas. `docs/ENGINE.md` lists the keys.
/// Texts (`&str`) and paths (`&Path`) convert to one.
#[derive(Clone, Copy, Debug)]
pub enum EngineConfig<'a> {
    /// The text.
    Text(&'a str),
    /// A file, which each rank reads. Its path has no brace.
    File(&'a Path),
}

impl<'a> From<&'a str> for EngineConfig<'a> {
    fn from(text: &'a str) -> Self {
        EngineConfig::Text(text)
    }
}

impl<'a> From<&'a String> for EngineConfig<'a> {
    fn from(text: &'a String) -> Self {
        EngineConfig::Text(text)
    }
}

impl<'a> From<&'a Path> for EngineConfig<'a> {
    fn from(path: &'a Path) -> Self {
        EngineConfig::File(path)
    }
}

impl<'a> From<&'a PathBuf> for EngineConfig<'a> {
    fn from(path: &'a PathBuf) -> Self {
        EngineConfig::File(path)
    }
}

impl EngineConfig<'_> {
    /// The library reads the file, so that a rank that cannot read it fails the creation on all.
    pub(crate) fn to_c_string(self) -> Result<CString> {
        let bytes = match self {
            EngineConfig::Text(text) => text.as_bytes(),
            EngineConfig::File(path) => path.as_os_str().as_bytes(),
        };
        CString::new(bytes).map_err(|error| {
            Error::argument(format!("the configuration has a zero byte at byte {}", error.nul_position()))
        })
    }
}

/// What an [`Engine`] has counted, including what a loaded checkpoint had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineCounts {
    /// Boundaries, with those whose step was skipped.
    pub global_steps: u64,
    /// Samples of all ranks.
    pub global_samples: u64,
    /// Boundaries whose step was skipped.
    pub skipped_steps: u64,
    /// Calls of [`Engine::step`].
    pub micro_steps: u64,
}

/// DeepSpeed's engine: it trains a model as a `ds_config` says, which chooses the optimizer, the ZeRO stage, the precision,
/// accumulation, clipping and the learning-rate schedule. The program computes, and is the same at every stage.
///
/// A unit's parameters can be read while an [`EngineForward`] or [`EngineBackward`] of it is alive. Every
/// [`gradient_accumulation_steps`](Self::gradient_accumulation_steps)-th [`step`](Self::step) is a boundary, where the
/// optimizer makes a step. Between boundaries gradients add up. All ranks make the same calls. Parameters are numbered in
/// order over all units.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, Comm, Engine};
/// let comm = Comm::from_env()?;
/// let config = r#"{
///     "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
///     "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
///     "zero_optimization": {"stage": 2},
/// }"#;
/// let mut engine = Engine::new(
///     &comm,
///     [("fc1", params!["w1" => (vec![1.0f32; 6], [3, 2])]), ("fc2", params!["w2" => (vec![1.0f32; 3], [3])])],
///     config,
/// )?;
/// for _ in 0..6 {
///     for unit in 0..engine.unit_count() {
///         let layer = engine.forward(unit)?;
///         for i in layer.indices() {
///             let _computed = layer.param(i)?.iter().sum::<f32>();
///         }
///         layer.done()?;
///     }
///     let (factor, adds) = (engine.loss_factor()? as f32, engine.adds_gradients()?);
///     for unit in (0..engine.unit_count()).rev() {
///         let layer = engine.backward(unit)?;
///         for i in layer.indices() {
///             for grad in layer.grad_mut(i)?.iter_mut() {
///                 *grad = factor + if adds { *grad } else { 0.0 };
///             }
///         }
///         layer.ready()?;
///     }
///     engine.backward_done()?;
///     engine.step()?; // every second one is a step of the optimizer
/// }
/// assert_eq!(engine.counts()?.global_steps, 3);
/// # Ok(()) }
/// ```
pub struct Engine<'c> {
    inner: Rc<EngineInner>,
    _comm: Borrowed<'c>,
}

struct Unit {
    name: String,
    indices: Range<usize>,
    /// A guard of it is alive, or a call that creates one is running.
    lent: Cell<bool>,
}

struct Param {
    name: String,
    shape: Vec<usize>,
    unit: usize,
    /// Its gradient is the library's, from its ready to the end of the pass, or to the next backward of its unit.
    ready: Cell<bool>,
}

/// Shared with the optimizers and states whose C side points at it.
pub(crate) struct EngineInner {
    handle: NonNull<sys::tsr_engine>,
    params: Vec<Param>,
    units: Vec<Unit>,
    has_schedule: bool,
    /// Whether the end of a pass marks the gradients ready that are not.
    fills_missing: bool,
    /// The parameters, without gradients, if they are trained in the program's memory; dropped after the handle. Empty: they
    /// are trained in that of the library.
    in_place: Group,
}

impl fmt::Debug for EngineInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.params.iter().map(|param| (&param.name, &param.shape))).finish()
    }
}

impl Owns for EngineInner {
    fn group(&self) -> Result<&Group> {
        match self.units.iter().find(|unit| unit.lent.get()) {
            None => Ok(&self.in_place),
            Some(unit) => Err(self.in_use(unit)),
        }
    }
}

impl Drop for EngineInner {
    fn drop(&mut self) {
        // SAFETY: this was the last owner: guards, optimizers and states that used it are gone.
        unsafe { sys::tsr_engine_destroy(self.handle.as_ptr()) }
    }
}

/// Calls of C with an out-parameter.
macro_rules! read_out {
    ($inner:expr, $function:ident, $initial:expr) => {{
        let mut out = $initial;
        // SAFETY: the handle is alive and used by this thread alone.
        check(unsafe { sys::$function($inner.as_ptr(), &mut out) })?;
        out
    }};
}

impl EngineInner {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_engine {
        self.handle.as_ptr()
    }

    /// What it trains in the program's memory.
    pub(crate) fn named_in_place(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.in_place.named_params()
    }

    fn in_use(&self, unit: &Unit) -> Error {
        Error::state(format!(
            "unit \"{}\" is in use: a guard of its forward or backward is alive; end it first",
            unit.name
        ))
    }

    fn unit(&self, unit: usize) -> Result<&Unit> {
        let no_such = || Error::argument(format!("unit {unit} does not exist; the model has {}", self.units.len()));
        self.units.get(unit).ok_or_else(no_such)
    }

    /// The library's names of the parameters, which the units have in order.
    fn read(&mut self, shapes: Vec<Vec<usize>>, units: Vec<String>) -> Result<()> {
        let count = read_out!(self, tsr_engine_param_count, 0);
        for (index, shape) in (0..count).zip(shapes) {
            let (mut name, mut unit) = (ptr::null(), 0);
            // SAFETY: the handle is alive, and the name lives as long.
            let name = unsafe {
                check(sys::tsr_engine_param_name(self.as_ptr(), index, &mut name, &mut unit))?;
                raw::text(name)
            };
            self.params.push(Param { name, shape, unit, ready: Cell::new(false) });
        }
        let mut end = 0;
        let count = read_out!(self, tsr_engine_unit_count, 0);
        for (unit, name) in (0..count).zip(units) {
            let begin = end;
            end += self.params[begin..].iter().take_while(|param| param.unit == unit).count();
            self.units.push(Unit { name, indices: begin..end, lent: Cell::new(false) });
        }
        Ok(())
    }

    fn description(&self) -> Result<Value> {
        Value::from_plain_json(&raw::read_text(|data, capacity, size| {
            // SAFETY: the buffer has this capacity.
            unsafe { sys::tsr_engine_description(self.as_ptr(), data.cast(), capacity, size) }
        })?)
    }

    /// Begins a unit's forward or backward, for a guard.
    fn begin(&self, unit: usize, begin: unsafe fn(*mut sys::tsr_engine, usize) -> sys::tsr_status) -> Result<Lent<'_>> {
        let info = self.unit(unit)?;
        if info.lent.replace(true) {
            return Err(self.in_use(info));
        }
        // It gives the unit back, unless `open`.
        let mut lent = Lent { inner: self, unit, params: Vec::new(), open: false };
        // SAFETY: the handle is alive and used by this thread alone.
        check(unsafe { begin(self.as_ptr(), unit) })?;
        // SAFETY: the memory is there until the forward, or the backward, ends, and the guard with it.
        let param = |index: usize| match self.in_place.params.get(index) {
            Some((_, tensor)) => Ok(tensor.clone()),
            None => unsafe { self.tensor(index, sys::tsr_engine_param) },
        };
        lent.params = info.indices.clone().map(param).collect::<Result<_>>()?;
        lent.open = true;
        Ok(lent)
    }

    /// # Safety
    /// What `get` gives stays as long as the tensor is used.
    unsafe fn tensor(
        &self,
        index: usize,
        get: unsafe fn(*mut sys::tsr_engine, usize, *mut sys::tsr_tensor) -> sys::tsr_status,
    ) -> Result<Tensor> {
        let mut tensor = raw::empty_tensor();
        // SAFETY: the handle is alive; the caller's promise.
        unsafe {
            check(get(self.as_ptr(), index, &mut tensor))?;
            Tensor::borrowed(&tensor)
        }
    }

    fn set_ready(&self, indices: Range<usize>, ready: bool) {
        self.params[indices].iter().for_each(|param| param.ready.set(ready));
    }
}

impl<'c> Engine<'c> {
    /// Makes an engine of a model, whose units come in the order of their forward. Checks that all ranks have the same
    /// configuration and model, and begins with rank 0's parameters. Rank 0 logs the keys that are unknown or without
    /// effect. Collective.
    ///
    /// The parameters are floating-point tensors on the CPU, with names that are unique in the model; a leading `module.` or
    /// `_orig_mod.` is stripped. At stage 0 without "fp16" and "bf16" the tensors are trained in place; otherwise they are
    /// only read here.
    ///
    /// # Errors
    /// `InvalidArgument`, on every rank: the configuration is malformed, contradicts itself or has no "optimizer"; the
    /// message has the key, its line, its value and what to do. Also for a model without units, a unit without parameters,
    /// or a name that occurs twice. `Unsupported`: the library refuses a key, does not have the optimizer or scheduler, or a
    /// tensor is on a device. `Mismatch`: the message names the first difference between ranks. `NotFound`, `Io`: the file
    /// cannot be read. `InvalidState`: a view of a tensor is alive, or it is deferred; `Timeout`, `Aborted`, `PeerLost`,
    /// `NoMemory`.
    pub fn new<'a, N: Into<String>>(
        comm: &'c Comm,
        units: impl IntoIterator<Item = (N, Params)>,
        config: impl Into<EngineConfig<'a>>,
    ) -> Result<Self> {
        Self::create(comm, units, config.into(), None)
    }

    /// [`Engine::new`] with a schedule of the program; the configuration must then have none. The engine attaches its
    /// optimizer to it and steps it.
    ///
    /// # Errors
    /// The same errors.
    pub fn with_schedule<'a, N: Into<String>>(
        comm: &'c Comm,
        units: impl IntoIterator<Item = (N, Params)>,
        config: impl Into<EngineConfig<'a>>,
        schedule: &mut LrSchedule,
    ) -> Result<Self> {
        Self::create(comm, units, config.into(), Some(schedule))
    }

    fn create<N: Into<String>>(
        comm: &'c Comm,
        units: impl IntoIterator<Item = (N, Params)>,
        config: EngineConfig<'_>,
        schedule: Option<&mut LrSchedule>,
    ) -> Result<Self> {
        let config = comm.or_refuse(Creation::Model, || config.to_c_string())?;
        let (mut tensors, mut names, mut given): (Vec<(String, Tensor)>, _, _) = (Vec::new(), Vec::new(), Vec::new());
        comm.or_refuse(Creation::Model, || {
            for (name, params) in units {
                let (name, begin): (String, _) = (name.into(), tensors.len());
                tensors.extend(params.into_items()?);
                given.push((raw::c_string("the unit", &name)?, begin..tensors.len()));
                names.push(name);
            }
            Ok(())
        })?;
        let held = comm.or_refuse(Creation::Model, || {
            Held::new(tensors.iter().map(|(name, tensor)| (name, tensor)), Use::Writes)
        })?;
        let raw_params = comm.or_refuse(Creation::Model, || RawParams::new(&tensors))?;
        let raw_units: Vec<_> = given
            .iter()
            .map(|(name, indices)| sys::tsr_engine_unit {
                name: name.as_ptr(),
                params: raw_params.as_slice()[indices.clone()].as_ptr(),
                n: indices.len(),
                reserved: 0,
            })
            .collect();
        let given_schedule = schedule.map_or(ptr::null_mut(), |schedule| schedule.inner().as_ptr());
        let mut handle = ptr::null_mut();
        // SAFETY: all is borrowed for the call, but the communicator, which the new object borrows, and the tensors, which it
        // keeps if they are trained in place.
        check(unsafe {
            let (units, n) = (raw_units.as_ptr(), raw_units.len());
            sys::tsr_engine_create(comm.as_ptr(), units, n, config.as_ptr(), given_schedule, &mut handle)
        })?;
        drop(held);
        let shapes = tensors.iter().map(|(_, tensor)| tensor.shape()).collect();
        let mut inner = EngineInner {
            handle: created(handle)?,
            params: Vec::new(),
            units: Vec::new(),
            has_schedule: false,
            fills_missing: true,
            in_place: Group { params: tensors, grads: Vec::new() },
        };
        inner.read(shapes, names)?;
        let description = inner.description()?;
        let of_zero = |key| description.get("zero_optimization").and_then(|zero| zero.get(key));
        let is_null = |value: Option<&Value>| matches!(value, None | Some(Value::Null));
        inner.has_schedule = !given_schedule.is_null() || !is_null(description.get("scheduler"));
        inner.fills_missing = of_zero("ignore_unused_parameters") != Some(&Value::Bool(false));
        if of_zero("stage") != Some(&Value::Int(0)) || description.get("precision") != Some(&"params".into()) {
            inner.in_place = Group::default();
        }
        Ok(Engine { inner: Rc::new(inner), _comm: Borrowed::new() })
    }

    /// What a configuration says for a number of data-parallel ranks, without an engine: a map with the batch sizes and
    /// every default filled in; `docs/ENGINE.md` lists its members. An optimizer or scheduler that the library does not have
    /// is passed through with "core" false. See also [`LrSchedule::from_config`].
    ///
    /// ```
    /// # fn main() -> tessera::Result<()> {
    /// let config = r#"{"train_batch_size": 32, "gradient_accumulation_steps": 2}"#;
    /// let resolved = tessera::Engine::resolve(config, 4)?;
    /// assert_eq!(resolved.get("train_micro_batch_size_per_gpu"), Some(&4.into()));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument`: it is malformed, or contradicts itself; the message has the key, its line, its value and what to
    /// do. `Unsupported`: a key that is refused; `NotFound`, `Io`: the file cannot be read; those of [`load`](crate::load).
    pub fn resolve<'a>(config: impl Into<EngineConfig<'a>>, ranks: usize) -> Result<Value> {
        crate::load()?;
        let (config, ranks) = (config.into().to_c_string()?, raw::int32("ranks", ranks)?);
        Value::from_plain_json(&raw::read_text(|data, capacity, size| {
            // SAFETY: the text is borrowed for the call, the buffer has this capacity.
            unsafe { sys::tsr_engine_config(config.as_ptr(), ranks, data.cast(), capacity, size) }
        })?)
    }

    pub(crate) fn inner(&self) -> &Rc<EngineInner> {
        &self.inner
    }

    /// What the configuration says, as [`Engine::resolve`], with the batch sizes as they are now.
    ///
    /// # Errors
    /// None in practice.
    pub fn description(&self) -> Result<Value> {
        self.inner.description()
    }

    /// The number of parameters, over all units.
    pub fn len(&self) -> usize {
        self.inner.params.len()
    }

    /// Whether there are no parameters; always false.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The index of the parameter `name`, without a leading `module.` or `_orig_mod.`.
    pub fn index(&self, name: &str) -> Option<usize> {
        let (name, mut index) = (CString::new(name).ok()?, 0);
        // SAFETY: the handle is alive and used by this thread alone, the name borrowed for the call; so in every method below.
        check(unsafe { sys::tsr_engine_find(self.inner.as_ptr(), name.as_ptr(), &mut index) }).ok()?;
        Some(index)
    }

    /// The name of parameter `index`; `None` beyond the last.
    pub fn name(&self, index: usize) -> Option<&str> {
        self.inner.params.get(index).map(|param| param.name.as_str())
    }

    /// The full shape of parameter `index`; `None` beyond the last.
    pub fn shape(&self, index: usize) -> Option<&[usize]> {
        self.inner.params.get(index).map(|param| param.shape.as_slice())
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

    /// Begins a unit's forward: returns when its parameters are valid. The guard gives access to them and ends the forward.
    /// To read values between steps, run a forward while not [training](Self::set_training). Collective.
    ///
    /// # Errors
    /// `InvalidArgument`: the unit does not exist; `InvalidState`: during a backward pass, or a guard of the unit is alive;
    /// `Mismatch`: another rank begins a different unit; `Timeout`, `Aborted`, `PeerLost`, `NoMemory`. `Interrupted`: call
    /// it again.
    pub fn forward(&self, unit: usize) -> Result<EngineForward<'_>> {
        Ok(EngineForward(self.inner.begin(unit, sys::tsr_engine_forward)?))
    }

    /// Begins a unit's backward: returns when its parameters and the memory of its gradients are valid. The guard gives
    /// access to both. The first one begins a backward pass. Collective.
    ///
    /// # Errors
    /// As [`Self::forward`], and `InvalidState`: [`Self::step`] was not called after the last backward pass, or all
    /// gradients of the unit are ready in this one.
    pub fn backward(&self, unit: usize) -> Result<EngineBackward<'_>> {
        let inner = &*self.inner;
        let lent = inner.begin(unit, sys::tsr_engine_backward)?;
        let indices = lent.info().indices.clone();
        // In place, the gradients of a pass are its own until it ends; otherwise this is the unit's next pass.
        if inner.in_place.params.is_empty() && inner.params[indices.clone()].iter().all(|param| param.ready.get()) {
            inner.set_ready(indices.clone(), false);
        }
        // SAFETY: the memory is there until the last gradient is ready, after which the guard does not give it.
        let grads = indices.map(|i| unsafe { inner.tensor(i, sys::tsr_engine_grad) }).collect::<Result<_>>()?;
        Ok(EngineBackward { lent, grads })
    }

    /// Ends a backward pass: returns when its gradients are reduced or accumulated. Gradients that are not ready count as
    /// zeros, unless "ignore_unused_parameters" is false. Collective.
    ///
    /// # Errors
    /// `InvalidState`: gradients are not ready, and "ignore_unused_parameters" is false; the message names them.
    /// [`Self::backward`] of their units continues the pass. `Mismatch`, `Timeout`, `Aborted`, `PeerLost`. `Interrupted`:
    /// call it again.
    pub fn backward_done(&mut self) -> Result<()> {
        let inner = &*self.inner;
        let ended = check(unsafe { sys::tsr_engine_backward_done(inner.as_ptr()) });
        if ended.is_ok() || inner.fills_missing {
            // After an error they are still being reduced, also those that the library marked.
            inner.set_ready(0..inner.params.len(), ended.is_err());
        }
        // No guard is alive, because the engine was not borrowed, but one may have been forgotten.
        inner.units.iter().for_each(|unit| unit.lent.set(false));
        ended
    }

    /// Ends a micro-step, after each backward pass outside [no_sync](Self::begin_no_sync). At a boundary the gradients are
    /// unscaled and clipped, the optimizer makes a step, gradients become zero, and the schedule moves on. If the gradients
    /// of any rank have an infinity or NaN, and the configuration skips such steps, parameters and schedule are unchanged.
    /// Returns whether the optimizer made a step, the same on every rank. Collective.
    ///
    /// # Errors
    /// `InvalidState`: there was no backward pass, or it is not done; in no_sync; the loss scale must shrink below its
    /// minimum; or a view of a tensor is alive that is trained in place. `InvalidArgument`, `Mismatch`, `Timeout`,
    /// `Aborted`, `PeerLost`, and `Interrupted`, after which the communicator can no longer be used.
    pub fn step(&mut self) -> Result<bool> {
        let _params = Held::new(self.inner.named_in_place(), Use::Writes)?;
        Ok(read_out!(self.inner, tsr_engine_step, 0) != 0)
    }

    /// What the loss is multiplied by before its backward pass: the loss scale over the accumulation.
    ///
    /// # Errors
    /// None in practice.
    pub fn loss_factor(&self) -> Result<f64> {
        Ok(read_out!(self.inner, tsr_engine_loss_factor, 0.0))
    }

    /// Whether this backward pass must add its gradients to what their memory holds, instead of overwriting it.
    ///
    /// # Errors
    /// None in practice.
    pub fn adds_gradients(&self) -> Result<bool> {
        Ok(read_out!(self.inner, tsr_engine_adds_gradients, 0) != 0)
    }

    /// Whether the next [`step`](Self::step) is one of the optimizer.
    ///
    /// # Errors
    /// None in practice.
    pub fn is_boundary(&self) -> Result<bool> {
        Ok(read_out!(self.inner, tsr_engine_is_boundary, 0) != 0)
    }

    /// Overrides from now on whether steps are boundaries, on every rank alike. `None` restores what the accumulation says.
    ///
    /// # Errors
    /// `InvalidState`: from the beginning of a backward pass to its step.
    pub fn set_boundary(&mut self, boundary: Option<bool>) -> Result<()> {
        let boundary = boundary.map_or(-1, i32::from);
        check(unsafe { sys::tsr_engine_set_boundary(self.inner.as_ptr(), boundary) })
    }

    /// From now on backward passes are not reduced, and [`step`](Self::step) is refused, at stages 0 and 1.
    ///
    /// # Errors
    /// `InvalidState`: it is on already, from stage 2 on, or from the beginning of a backward pass to its step.
    pub fn begin_no_sync(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_engine_begin_no_sync(self.inner.as_ptr()) })
    }

    /// The next backward pass is reduced again, with what those before it accumulated.
    ///
    /// # Errors
    /// `InvalidState`: it is not on, or during a backward pass.
    pub fn end_no_sync(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_engine_end_no_sync(self.inner.as_ptr()) })
    }

    /// Sets whether backward passes follow, initially `true`. While none do, the end of a forward shards its unit.
    ///
    /// # Errors
    /// None in practice.
    pub fn set_training(&mut self, training: bool) -> Result<()> {
        check(unsafe { sys::tsr_engine_set_training(self.inner.as_ptr(), i32::from(training)) })
    }

    /// Whether backward passes follow.
    ///
    /// # Errors
    /// None in practice.
    pub fn is_training(&self) -> Result<bool> {
        Ok(read_out!(self.inner, tsr_engine_is_training, 0) != 0)
    }

    /// The counters.
    ///
    /// # Errors
    /// None in practice.
    pub fn counts(&self) -> Result<EngineCounts> {
        let mut counts = sys::tsr_engine_counts {
            struct_size: size_of::<sys::tsr_engine_counts>(),
            global_steps: 0,
            global_samples: 0,
            skipped_steps: 0,
            micro_steps: 0,
        };
        check(unsafe { sys::tsr_engine_counters(self.inner.as_ptr(), &mut counts) })?;
        let count = |value| u64::try_from(value).unwrap_or(0);
        Ok(EngineCounts {
            global_steps: count(counts.global_steps),
            global_samples: count(counts.global_samples),
            skipped_steps: count(counts.skipped_steps),
            micro_steps: count(counts.micro_steps),
        })
    }

    /// The norm of the gradients of all ranks at the last boundary, before clipping and without the loss scale; infinite if
    /// the step was skipped. `None`: there was no boundary yet, or "compute_grad_norm" is false.
    ///
    /// # Errors
    /// None in practice.
    pub fn grad_norm(&self) -> Result<Option<f64>> {
        Ok(Some(read_out!(self.inner, tsr_engine_grad_norm, 0.0)).filter(|norm| !norm.is_nan()))
    }

    /// The learning rate of the next step.
    ///
    /// # Errors
    /// None in practice.
    pub fn lr(&self) -> Result<f64> {
        Ok(read_out!(self.inner, tsr_engine_lr, 0.0))
    }

    /// Sets the learning rate, on every rank alike. A schedule sets it again after each step.
    ///
    /// # Errors
    /// `InvalidArgument`: it is negative, or not finite.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        check(unsafe { sys::tsr_engine_set_lr(self.inner.as_ptr(), lr) })
    }

    /// The loss scale; 1 without "fp16".
    ///
    /// # Errors
    /// None in practice.
    pub fn loss_scale(&self) -> Result<f64> {
        Ok(read_out!(self.inner, tsr_engine_loss_scale, 0.0))
    }

    fn batch(&self) -> Result<[usize; 3]> {
        let [mut train, mut micro, mut accumulation] = [0; 3];
        check(unsafe { sys::tsr_engine_batch(self.inner.as_ptr(), &mut train, &mut micro, &mut accumulation) })?;
        Ok([train, micro, accumulation].map(|size| usize::try_from(size).unwrap_or(0)))
    }

    /// Samples of all ranks per step of the optimizer: micro-batch times accumulation times ranks.
    ///
    /// # Errors
    /// None in practice.
    pub fn train_batch_size(&self) -> Result<usize> {
        Ok(self.batch()?[0])
    }

    /// Samples of a rank per backward pass.
    ///
    /// # Errors
    /// None in practice.
    pub fn train_micro_batch_size(&self) -> Result<usize> {
        Ok(self.batch()?[1])
    }

    /// Backward passes per step of the optimizer.
    ///
    /// # Errors
    /// None in practice.
    pub fn gradient_accumulation_steps(&self) -> Result<usize> {
        Ok(self.batch()?[2])
    }

    /// Sets another train batch, a multiple of micro-batch times ranks, by another accumulation. On every rank alike,
    /// between steps of the optimizer.
    ///
    /// # Errors
    /// `InvalidArgument`: it is not such a multiple; the message has the formula. `InvalidState`: gradients have accumulated.
    pub fn set_train_batch_size(&mut self, size: usize) -> Result<()> {
        let size = raw::int64("train_batch_size", size)?;
        check(unsafe { sys::tsr_engine_set_train_batch_size(self.inner.as_ptr(), size) })
    }

    /// Sets another micro-batch, and so another train batch. On every rank alike, between steps of the optimizer.
    ///
    /// # Errors
    /// As [`Self::set_train_batch_size`].
    pub fn set_train_micro_batch_size(&mut self, size: usize) -> Result<()> {
        let size = raw::int64("train_micro_batch_size", size)?;
        check(unsafe { sys::tsr_engine_set_train_micro_batch_size(self.inner.as_ptr(), size) })
    }

    /// The optimizer, for its settings; the engine makes its steps. Another handle, which keeps the parameters alive.
    ///
    /// # Errors
    /// `NoMemory`.
    pub fn optimizer(&self) -> Result<Optimizer<'c>> {
        let handle = read_out!(self.inner, tsr_engine_optimizer, ptr::null_mut());
        Ok(Optimizer::of_engine(created(handle)?, self.inner.clone()))
    }

    /// The learning-rate schedule, whose steps the engine makes; `None` if there is none. Another handle, which may outlive
    /// the engine.
    ///
    /// # Errors
    /// `NoMemory`.
    pub fn schedule(&self) -> Result<Option<LrSchedule>> {
        if !self.inner.has_schedule {
            return Ok(None);
        }
        made(|out| check(unsafe { sys::tsr_engine_lr_schedule(self.inner.as_ptr(), out) })).map(Some)
    }
}

impl fmt::Debug for Engine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl LrSchedule {
    /// The schedule of a configuration's "scheduler", for trainers without an [`Engine`].
    ///
    /// # Errors
    /// As [`Engine::resolve`]; `InvalidArgument`: there is no "scheduler"; `Unsupported`: the library does not have its type.
    pub fn from_config<'a>(config: impl Into<EngineConfig<'a>>) -> Result<Self> {
        let config = config.into().to_c_string()?;
        // SAFETY: the text is borrowed for the call.
        made(|out| check(unsafe { sys::tsr_engine_config_schedule(config.as_ptr(), out) }))
    }
}

/// A unit in its forward or backward, for its guard.
struct Lent<'e> {
    inner: &'e EngineInner,
    unit: usize,
    params: Vec<Tensor>,
    /// Whether it must still be ended.
    open: bool,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.info().lent.set(false);
    }
}

impl Lent<'_> {
    fn info(&self) -> &Unit {
        &self.inner.units[self.unit]
    }

    /// The position of a parameter in the unit, while that can be used.
    fn position(&self, index: usize) -> Result<usize> {
        let Unit { name, indices, .. } = self.info();
        if !indices.contains(&index) {
            let (first, last) = (indices.start, indices.end - 1);
            return Err(Error::argument(format!(
                "parameter {index} does not belong to unit \"{name}\", which has {first} to {last}"
            )));
        }
        if !self.open {
            return Err(Error::state(format!(
                "the gradients of unit \"{name}\" are all ready, with which its backward has ended"
            )));
        }
        Ok(index - indices.start)
    }

    fn param<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
        self.params[self.position(index)?].view()
    }

    /// Ends it, once.
    fn end(&mut self, end: unsafe fn(*mut sys::tsr_engine, usize) -> sys::tsr_status) -> Result<()> {
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

macro_rules! accessors {
    ($($lent:tt)*) => {
        /// The unit's parameters.
        pub fn indices(&self) -> Range<usize> {
            self.$($lent)*.info().indices.clone()
        }

        /// Parameter `index`, an `f32` tensor, to read.
        ///
        /// # Errors
        /// `InvalidArgument`: it does not belong to this unit, or it is not `f32`: with "fp16" and "bf16" the model is
        /// computed in that dtype. `InvalidState`: its backward has ended, or a mutable view of its tensor is alive.
        pub fn param(&self, index: usize) -> Result<View<'_, f32>> {
            self.param_as(index)
        }

        /// [`Self::param`] for any dtype.
        ///
        /// # Errors
        /// The same errors.
        pub fn param_as<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
            self.$($lent)*.param(index)
        }
    };
}

/// A unit in its forward, created by [`Engine::forward`]. Dropping it ends the forward like [`done`](Self::done), which also
/// returns errors.
#[must_use = "the forward ends when this is dropped"]
pub struct EngineForward<'e>(Lent<'e>);

impl EngineForward<'_> {
    accessors!(0);

    /// Ends the forward: the parameters may be sharded from now on.
    ///
    /// # Errors
    /// `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, `NoMemory`. `Interrupted`: begin the forward again.
    pub fn done(mut self) -> Result<()> {
        self.0.end(sys::tsr_engine_forward_done)
    }
}

impl Drop for EngineForward<'_> {
    fn drop(&mut self) {
        let _ = self.0.end(sys::tsr_engine_forward_done); // the next call fails with it, too
    }
}

impl fmt::Debug for EngineForward<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt("EngineForward", f)
    }
}

/// A unit in its backward, created by [`Engine::backward`]: its gradients must be written.
///
/// [`ready`](Self::ready) ends it. If it is dropped earlier, for example because of an error, the unit's backward continues
/// without the guard: [`Engine::backward`] returns another guard with the gradients written so far, and
/// [`Engine::backward_done`] counts those that are not ready as zeros, or names them.
#[must_use = "ready() ends the unit's backward"]
pub struct EngineBackward<'e> {
    lent: Lent<'e>,
    grads: Vec<Tensor>,
}

impl EngineBackward<'_> {
    accessors!(lent);

    /// The gradient of parameter `index`, an `f32` tensor, to write. If [`Engine::adds_gradients`], add to what it holds;
    /// otherwise overwrite all of it, as its values are arbitrary.
    ///
    /// # Errors
    /// `InvalidArgument`: it does not belong to this unit, or is not `f32`: it has the dtype of the parameter.
    /// `InvalidState`: it is ready, or a view of it is alive.
    pub fn grad_mut(&self, index: usize) -> Result<ViewMut<'_, f32>> {
        self.grad_mut_as(index)
    }

    /// [`Self::grad_mut`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn grad_mut_as<T: Element>(&self, index: usize) -> Result<ViewMut<'_, T>> {
        let grad = &self.grads[self.lent.position(index)?];
        let param = &self.lent.inner.params[index];
        if param.ready.get() {
            return Err(Error::state(format!(
                "the gradient of \"{}\" is ready; write it before, or in the next backward pass",
                param.name
            )));
        }
        grad.view_mut()
    }

    /// Marks the gradient of parameter `index` ready: it is written. At stage 0 its reduction can then begin. With the last
    /// one, the unit's backward ends.
    ///
    /// # Errors
    /// `InvalidArgument`: it does not belong to this unit; `InvalidState`: it is ready already; `Aborted`.
    pub fn ready_param(&mut self, index: usize) -> Result<()> {
        self.lent.position(index)?;
        let inner = self.lent.inner;
        let marked = check(unsafe { sys::tsr_engine_ready(inner.as_ptr(), index) });
        inner.params[index].ready.set(true); // if it failed, the library may have begun
        self.lent.open = !inner.params[self.indices()].iter().all(|param| param.ready.get());
        marked
    }

    /// Marks the gradients ready that are not yet, once all are written. This ends the unit's backward: unless the pass is
    /// not reduced, their reduction begins in the background.
    ///
    /// # Errors
    /// `Aborted`.
    pub fn ready(mut self) -> Result<()> {
        self.lent.inner.set_ready(self.indices(), true);
        self.lent.end(sys::tsr_engine_unit_ready)
    }
}

/// Ensures that views of the gradients end before.
impl Drop for EngineBackward<'_> {
    fn drop(&mut self) {}
}

impl fmt::Debug for EngineBackward<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lent.fmt("EngineBackward", f)
    }
}
