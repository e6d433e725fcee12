//! The state that a checkpoint saves and loads in place: named tensors and named values.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use tessera_sys as sys;

use crate::callback::{answer, CallbackResult};
use crate::comm::{Borrowed, Comm, CudaTensor};
use crate::data::{Sampler, SamplerInner};
use crate::ddp::{Ddp, Inner};
use crate::element::DType;
use crate::engine::{Engine, EngineInner};
use crate::error::{check, Error, Result};
use crate::fsdp::{Fsdp, FsdpInner};
use crate::grad_scaler::{GradScaler, GradScalerInner};
use crate::layout::Layout;
use crate::lr_schedule::{LrSchedule, LrScheduleInner};
use crate::metrics::{MetricInner, MetricPart};
use crate::optim::{Optimizer, OptimizerInner};
use crate::params::Local;
use crate::raw::{self, created};
use crate::tensor::{Held, Tensor, TensorInfo, Use};
use crate::tp::{TensorParallel, TpInner};
use crate::value::Value;
use crate::work::Views;

/// The model, optimizers, samplers, tensors and values of one training job. It keeps added objects alive, and a load
/// writes into them. `'c` is the lifetime for which their communicators are borrowed.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{Comm, Saver, State, Tensor};
/// # let folder = tempfile::tempdir().unwrap();
/// # let root = folder.path().join("checkpoints");
/// let comm = Comm::from_env()?;
/// let weights = Tensor::new(vec![1.0f32, 2.0], [2])?;
/// let mut state = State::new().with("weights", &weights);
/// state.set("note", "first try")?;
/// let saver = Saver::at(&comm, &root).open()?;
/// saver.save(10, &state)?;
/// weights.view_mut::<f32>()?.fill(0.0);
/// assert_eq!(saver.resume(&mut state)?, 10);
/// assert_eq!(weights.view::<f32>()?[..], [1.0, 2.0]);
/// # Ok(()) }
/// ```
pub struct State<'c> {
    handle: Option<NonNull<sys::tsr_state>>,
    /// The first error of `new` or `with`, which later calls return.
    error: Option<Error>,
    kept: Vec<Kept>,
    _comm: Borrowed<'c>,
}

/// What the C object points at.
enum Kept {
    Tensor(String, Tensor),
    Ddp(Rc<Inner>),
    Fsdp(Rc<FsdpInner>),
    TensorParallel(Rc<TpInner>),
    Engine(Rc<EngineInner>),
    Optimizer { _kept: Rc<OptimizerInner> },
    GradScaler { _kept: Rc<GradScalerInner> },
    LrSchedule { _kept: Rc<LrScheduleInner> },
    Metric { _kept: Rc<MetricInner> },
    Sampler(Arc<SamplerInner>),
}

impl Drop for State<'_> {
    fn drop(&mut self) {
        if let Some(handle) = self.handle {
            // SAFETY: the handle is ours and not used again; what it points at is dropped after this.
            unsafe { sys::tsr_state_destroy(handle.as_ptr()) }
        }
    }
}

mod sealed {
    pub trait Sealed<'c> {
        fn add_to(&self, state: &mut super::State<'c>, name: &str) -> crate::Result<()>;
    }
}

/// Objects that a [`State`] takes: a [`Ddp`], [`Fsdp`], [`TensorParallel`] or [`Local`] model, an [`Engine`], an
/// [`Optimizer`], a [`GradScaler`], an [`LrSchedule`], a [`Sampler`], a [`MetricPart`], a [`Tensor`], a [`CudaTensor`], and
/// any [`Stateful`] object in an `Rc<RefCell<_>>`.
pub trait StatePart<'c>: sealed::Sealed<'c> {}
impl<'c, T: sealed::Sealed<'c>> StatePart<'c> for T {}

/// The values of a [`Stateful`] object by name.
pub type StateDict = BTreeMap<String, Value>;

/// A custom object whose values a [`State`] collects at each save and gives back at each load. Add its tensors to the
/// state like any others.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use std::{cell::RefCell, rc::Rc};
/// use tessera::{CallbackResult, Saver, State, StateDict, Stateful, Value};
///
/// struct Best {
///     loss: f64,
/// }
///
/// impl Stateful for Best {
///     fn state_dict(&self) -> CallbackResult<StateDict> {
///         Ok(StateDict::from([("loss".to_owned(), self.loss.into())]))
///     }
///     fn load_state_dict(&mut self, values: StateDict) -> CallbackResult<()> {
///         let Some(Value::Double(loss)) = values.get("loss") else { return Err("the loss is not a number".into()) };
///         self.loss = *loss;
///         Ok(())
///     }
/// }
///
/// # let folder = tempfile::tempdir().unwrap();
/// let best = Rc::new(RefCell::new(Best { loss: 0.25 }));
/// let mut state = State::new().with("best", &best); // saved as "best.loss"
/// let saver = Saver::alone(folder.path()).open()?;
/// saver.save(1, &state)?;
/// best.borrow_mut().loss = 1.0;
/// saver.resume(&mut state)?;
/// assert_eq!(best.borrow().loss, 0.25);
/// # Ok(()) }
/// ```
///
/// The methods run on the thread that saves or loads, before that call returns, even for a save in the background. An
/// error or panic becomes the error of the save or load on every rank; nothing is saved or overwritten then, unless
/// `load_state_dict` failed. The state, its saver and its samplers are in use during the call: calls on them fail with
/// `InvalidState`, as does a save or load while the object is borrowed.
pub trait Stateful {
    /// The values to save; rank 0's are saved, unless the prefix is `rank/<r>/...`. All ranks must return the same
    /// names.
    ///
    /// # Errors
    /// Any.
    fn state_dict(&self) -> CallbackResult<StateDict>;
    /// Checks that [`load_state_dict`](Self::load_state_dict) would accept these values. The default accepts them.
    ///
    /// # Errors
    /// Any; nothing is overwritten then.
    fn check_state_dict(&self, values: &StateDict) -> CallbackResult<()> {
        let _ = values;
        Ok(())
    }
    /// Restores the values after the tensors of a load: the saved values of all names that
    /// [`state_dict`](Self::state_dict) returns, whatever their kind; for names that the load allowed to be missing,
    /// the values that `state_dict` returned.
    ///
    /// # Errors
    /// Any.
    fn load_state_dict(&mut self, values: StateDict) -> CallbackResult<()>;
}

impl<'c, 'd: 'c> sealed::Sealed<'c> for Ddp<'d> {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        // SAFETY: the state keeps the object; handles are used by this thread alone; so below.
        check(unsafe { sys::tsr_state_add_ddp(state.as_ptr()?, name.as_ptr(), inner.as_ptr()) })?;
        state.kept.push(Kept::Ddp(Rc::clone(inner)));
        Ok(())
    }
}

impl<'c, 'd: 'c> sealed::Sealed<'c> for Fsdp<'d> {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        check(unsafe { sys::tsr_state_add_fsdp(state.as_ptr()?, name.as_ptr(), inner.as_ptr()) })?;
        state.kept.push(Kept::Fsdp(Rc::clone(inner)));
        Ok(())
    }
}

impl<'c, 'd: 'c> sealed::Sealed<'c> for TensorParallel<'d> {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        // SAFETY: the state keeps the object; both are used by this thread alone.
        check(unsafe { sys::tsr_state_add_tp(state.as_ptr()?, name.as_ptr(), inner.as_ptr()) })?;
        state.kept.push(Kept::TensorParallel(Rc::clone(inner)));
        Ok(())
    }
}

impl<'c, 'd: 'c> sealed::Sealed<'c> for Engine<'d> {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        check(unsafe { sys::tsr_state_add_engine(state.as_ptr()?, name.as_ptr(), inner.as_ptr()) })?;
        state.kept.push(Kept::Engine(Rc::clone(inner)));
        Ok(())
    }
}

impl<'c, 'd: 'c> sealed::Sealed<'c> for Optimizer<'d> {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        check(unsafe { sys::tsr_state_add_optimizer(state.as_ptr()?, name.as_ptr(), inner.as_ptr()) })?;
        state.kept.push(Kept::Optimizer { _kept: Rc::clone(inner) });
        Ok(())
    }
}

impl<'c> sealed::Sealed<'c> for GradScaler {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        check(unsafe { sys::tsr_state_add_grad_scaler(state.as_ptr()?, name.as_ptr(), inner.as_ptr()) })?;
        state.kept.push(Kept::GradScaler { _kept: Rc::clone(inner) });
        Ok(())
    }
}

impl<'c> sealed::Sealed<'c> for MetricPart<'_> {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        check(unsafe {
            sys::tsr_state_add_metric(state.as_ptr()?, name.as_ptr(), inner.as_ptr(), self.comm().as_ptr())
        })?;
        state.kept.push(Kept::Metric { _kept: Rc::clone(inner) });
        Ok(())
    }
}

impl<'c> sealed::Sealed<'c> for LrSchedule {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        check(unsafe { sys::tsr_state_add_lr_schedule(state.as_ptr()?, name.as_ptr(), inner.as_ptr()) })?;
        state.kept.push(Kept::LrSchedule { _kept: Rc::clone(inner) });
        Ok(())
    }
}

impl<'c> sealed::Sealed<'c> for Sampler {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (inner, name) = (self.inner(), raw::c_string("the prefix", name)?);
        check(unsafe { sys::tsr_state_add_sampler(state.as_ptr()?, name.as_ptr(), inner.lock()?.as_ptr()) })?;
        state.kept.push(Kept::Sampler(Arc::clone(inner)));
        Ok(())
    }
}

impl<'c> sealed::Sealed<'c> for Local {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        self.group.params.iter().try_for_each(|(param, tensor)| tensor.add_to(state, &format!("{name}.{param}")))
    }
}

impl<'c> sealed::Sealed<'c> for Tensor {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let c_name = raw::c_string("the name", name)?;
        check(unsafe { sys::tsr_state_add_tensor(state.as_ptr()?, c_name.as_ptr(), &self.as_raw()) })?;
        state.kept.push(Kept::Tensor(name.to_owned(), self.clone()));
        Ok(())
    }
}

impl<'c> sealed::Sealed<'c> for CudaTensor {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let c_name = raw::c_string("the name", name)?;
        let views = self.clone().into_views(Views::default());
        // SAFETY: whoever made the tensor keeps its memory; the view is copied.
        check(unsafe { sys::tsr_state_add_tensor(state.as_ptr()?, c_name.as_ptr(), views.tensors().as_ptr()) })
    }
}

/// What the callbacks of an object get.
struct Source<'c> {
    object: Rc<RefCell<dyn Stateful + 'c>>,
    /// What it gave last, and is given back.
    names: Cell<Vec<String>>,
}

impl Source<'_> {
    /// # Safety
    /// `values` is the state that C lends a callback.
    unsafe fn collect(&self, values: *mut sys::tsr_state) -> CallbackResult<i32> {
        let object = self.object.try_borrow().map_err(|_| borrowed())?;
        let mut values = lent(values);
        let mut names = Vec::new();
        for (name, value) in object.state_dict()? {
            values.set(&name, value)?;
            names.push(name);
        }
        self.names.set(names);
        Ok(sys::TSR_OK)
    }

    /// # Safety
    /// As `collect`.
    unsafe fn given(&self, values: *const sys::tsr_state) -> Result<StateDict> {
        let names = self.names.take();
        let values = lent(values.cast_mut());
        let found = names.iter().map(|name| Ok((name.clone(), values.get(name)?))).collect();
        self.names.set(names);
        found
    }
}

/// The state that C lends a callback, which is C's to destroy.
fn lent(values: *mut sys::tsr_state) -> ManuallyDrop<State<'static>> {
    let handle = NonNull::new(values);
    ManuallyDrop::new(State { handle, error: None, kept: Vec::new(), _comm: Borrowed::new() })
}

fn borrowed() -> Error {
    Error::state("the object is borrowed elsewhere; end the borrow before the state is saved or loaded")
}

/// # Safety
/// `user_data` is the box of `add_to`, which lives until `free`.
unsafe fn source<'a>(user_data: *mut c_void) -> &'a Source<'a> {
    // SAFETY: the caller's promise.
    unsafe { &*user_data.cast_const().cast::<Source<'a>>() }
}

// SAFETY of all callbacks: the library passes what state.h says, and the user data of `add_to`; it calls them while the
// state is in use, and so alive.

unsafe extern "C" fn on_collect(values: *mut sys::tsr_state, message: *mut c_char, user_data: *mut c_void) -> i32 {
    unsafe { answer(message, || source(user_data).collect(values)) }
}

unsafe extern "C" fn on_check(values: *const sys::tsr_state, message: *mut c_char, user_data: *mut c_void) -> i32 {
    unsafe {
        answer(message, || {
            let source = source(user_data);
            let object = source.object.try_borrow().map_err(|_| borrowed())?;
            object.check_state_dict(&source.given(values)?)?;
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn on_apply(values: *const sys::tsr_state, message: *mut c_char, user_data: *mut c_void) -> i32 {
    unsafe {
        answer(message, || {
            let source = source(user_data);
            let mut object = source.object.try_borrow_mut().map_err(|_| borrowed())?;
            object.load_state_dict(source.given(values)?)?;
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn free(user_data: *mut c_void) {
    let source = unsafe { Box::from_raw(user_data.cast::<Source<'_>>()) };
    raw::contained(|| drop(source));
}

impl<'c, T: Stateful + 'c> sealed::Sealed<'c> for Rc<RefCell<T>> {
    fn add_to(&self, state: &mut State<'c>, name: &str) -> Result<()> {
        let (prefix, state) = (raw::c_string("the prefix", name)?, state.as_ptr()?);
        let object: Rc<RefCell<dyn Stateful + 'c>> = Rc::<RefCell<T>>::clone(self);
        let user_data: *mut Source<'c> = Box::into_raw(Box::new(Source { object, names: Cell::default() }));
        let source = sys::tsr_state_source {
            struct_size: size_of::<sys::tsr_state_source>(),
            collect: Some(on_collect),
            check: Some(on_check),
            apply: Some(on_apply),
            destroy: Some(free),
            user_data: user_data.cast(),
        };
        // SAFETY: the library copies the struct, and frees the box with the state, which 'c outlives, or at once if it fails.
        check(unsafe { sys::tsr_state_add_source(state, prefix.as_ptr(), &source) })
    }
}

impl Default for State<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'c> State<'c> {
    /// An empty state.
    pub fn new() -> Self {
        let create = || {
            crate::load()?;
            let mut handle = ptr::null_mut();
            // SAFETY: the library is loaded.
            check(unsafe { sys::tsr_state_create(&mut handle) })?;
            created(handle)
        };
        let (handle, error) = match create() {
            Ok(handle) => (Some(handle), None),
            Err(error) => (None, Some(error)),
        };
        State { handle, error, kept: Vec::new(), _comm: Borrowed::new() }
    }

    /// Adds `object` as `name`, or its parts as `name.part`. An error is returned by the first save, load or other use,
    /// so that a state can be built in one expression; [`State::add`] returns it immediately.
    #[must_use]
    pub fn with(mut self, name: &str, object: &impl StatePart<'c>) -> Self {
        if self.error.is_none() {
            self.error = self.add(name, object).err();
        }
        self
    }

    /// Adds a model's parameters as `name.<parameter>`, an optimizer's moments and settings, a sampler's position, a
    /// replicated tensor (complete and equal on every rank), or the values of a custom object ([`Stateful`]) as
    /// `name.<value>`. An [`Engine`] adds all that it trains and counts, for loads at any number of ranks, stage, precision
    /// and batch sizes; while its gradients wait for the optimizer's step, saves and loads fail with `InvalidState`.
    ///
    /// # Errors
    /// `InvalidArgument`: the name is empty, too long, or already used.
    pub fn add(&mut self, name: &str, object: &impl StatePart<'c>) -> Result<()> {
        object.add_to(self, name)
    }

    /// Sets the stream on which the program makes and uses the state's tensors of a CUDA device. A save reads them after
    /// what that stream has when it is called, a load overwrites them after it. What the stream gets after a background
    /// save was called waits, on the device, until they are copied. Without this call it is the device's default stream.
    ///
    /// # Errors
    /// `InvalidArgument`: there is no such device, or the stream is of another; `Unsupported`: CUDA cannot be used.
    ///
    /// # Safety
    /// `stream` is null, for the default stream, or a stream that outlives the state or the next call of this.
    pub unsafe fn set_stream(&mut self, cuda_device: usize, stream: *mut c_void) -> Result<()> {
        let device = raw::int32("the device", cuda_device)?;
        // SAFETY: the handle is alive, the stream by the caller's promise.
        check(unsafe { sys::tsr_state_set_stream(self.as_ptr()?, device, stream) })
    }

    /// Adds this rank's pieces of a tensor on CUDA devices, as [`add_sharded`](Self::add_sharded) does of one on the CPU.
    ///
    /// # Errors
    /// `InvalidArgument`: number, dtype or shape of the pieces do not fit; `Unsupported`: they are on several devices.
    pub fn add_cuda_sharded(
        &mut self,
        name: &str,
        layout: &Layout,
        dtype: DType,
        pieces: &[CudaTensor],
        rank: usize,
    ) -> Result<()> {
        let regions = layout.regions(rank)?.len();
        if regions != pieces.len() {
            return Err(Error::argument(format!(
                "{name}: the layout has {regions} pieces for rank {rank}, got {}",
                pieces.len()
            )));
        }
        let c_name = raw::c_string("the name", name)?;
        let views = pieces.iter().cloned().fold(Views::default(), |views, piece| piece.into_views(views));
        let data = if pieces.is_empty() { ptr::null() } else { views.tensors().as_ptr() };
        // SAFETY: there is a piece for each box; whoever made them keeps their memory.
        check(unsafe {
            let rank = raw::int32("the rank", rank)?;
            let state = self.as_ptr()?;
            sys::tsr_state_add_sharded(state, c_name.as_ptr(), layout.as_ptr(), dtype.as_raw(), data, rank)
        })
    }

    /// Adds this rank's pieces of a tensor that is distributed according to `layout`: one tensor for each of its
    /// [`regions`](Layout::regions), with the region's sizes. Pieces without elements, which the layout omits, are
    /// allowed.
    ///
    /// # Errors
    /// `InvalidArgument`: number, dtype or shape of the pieces do not fit.
    pub fn add_sharded(
        &mut self,
        name: &str,
        layout: &Layout,
        dtype: DType,
        pieces: &[Tensor],
        rank: usize,
    ) -> Result<()> {
        let regions = layout.regions(rank)?;
        let mut pieces: Vec<&Tensor> = pieces.iter().collect();
        if regions.len() != pieces.len() {
            pieces.retain(|piece| !piece.is_empty());
        }
        if regions.len() != pieces.len() {
            return Err(Error::argument(format!(
                "{name}: the layout has {} pieces for rank {rank}, got {}",
                regions.len(),
                pieces.len()
            )));
        }
        let c_name = raw::c_string("the name", name)?;
        let tensors: Vec<_> = pieces.iter().map(|piece| piece.as_raw()).collect();
        let data = if tensors.is_empty() { ptr::null() } else { tensors.as_ptr() };
        // SAFETY: there is a piece for each box; the state keeps the pieces.
        check(unsafe {
            let rank = raw::int32("the rank", rank)?;
            let state = self.as_ptr()?;
            sys::tsr_state_add_sharded(state, c_name.as_ptr(), layout.as_ptr(), dtype.as_raw(), data, rank)
        })?;
        self.kept.extend(pieces.into_iter().map(|piece| Kept::Tensor(name.to_owned(), piece.clone())));
        Ok(())
    }

    /// Sets the value `name`.
    ///
    /// # Errors
    /// `InvalidArgument`: the name or the value is invalid.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) -> Result<()> {
        let (c_name, state) = (raw::c_string("the name", name)?, self.as_ptr()?);
        // SAFETY: handle and strings are alive; so in every method below.
        match value.into() {
            Value::Int(value) => check(unsafe { sys::tsr_state_set_int64(state, c_name.as_ptr(), value) }),
            Value::Double(value) => check(unsafe { sys::tsr_state_set_double(state, c_name.as_ptr(), value) }),
            value => {
                let json = raw::c_string("the value", &value.to_json()?)?;
                check(unsafe { sys::tsr_state_set_value(state, c_name.as_ptr(), json.as_ptr()) })
            }
        }
    }

    /// The value `name`.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn get(&self, name: &str) -> Result<Value> {
        let (name, state) = (raw::c_string("the name", name)?, self.as_ptr()?);
        Value::from_json(&raw::read_text(|data, capacity, size| unsafe {
            sys::tsr_state_get_value(state, name.as_ptr(), data.cast(), capacity, size)
        })?)
    }

    /// The value `name`, an integer.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument`: it is not an integer.
    pub fn get_int(&self, name: &str) -> Result<i64> {
        let mut value = 0;
        let (name, state) = (raw::c_string("the name", name)?, self.as_ptr()?);
        check(unsafe { sys::tsr_state_get_int64(state, name.as_ptr(), &mut value) })?;
        Ok(value)
    }

    /// The value `name`, a floating-point number.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument`: it is not a floating-point number.
    pub fn get_double(&self, name: &str) -> Result<f64> {
        let mut value = 0.0;
        let (name, state) = (raw::c_string("the name", name)?, self.as_ptr()?);
        check(unsafe { sys::tsr_state_get_double(state, name.as_ptr(), &mut value) })?;
        Ok(value)
    }

    /// Sets a metric (`"loss"`) of the next save, which consumes it even if it fails. `tessera ckpt ls` shows it.
    ///
    /// # Errors
    /// `InvalidArgument`: the name.
    pub fn set_metric(&mut self, name: &str, value: f64) -> Result<()> {
        let (name, state) = (raw::c_string("the name", name)?, self.as_ptr()?);
        check(unsafe { sys::tsr_state_set_metric(state, name.as_ptr(), value) })
    }

    /// Its global tensors, sorted by name.
    ///
    /// # Errors
    /// The error of a state that could not be built.
    pub fn tensors(&self) -> Result<Vec<TensorInfo>> {
        let (state, mut count) = (self.as_ptr()?, 0);
        check(unsafe { sys::tsr_state_tensor_count(state, &mut count) })?;
        let tensor = |index| {
            // SAFETY: it is plain; what it points to lives as long as the state, and is copied.
            unsafe {
                let mut raw: sys::tsr_param = std::mem::zeroed();
                check(sys::tsr_state_tensor(state, index, &mut raw))?;
                TensorInfo::new(raw.name, raw.tensor.dtype, raw.tensor.shape, raw.tensor.ndim)
            }
        };
        (0..count).map(tensor).collect()
    }

    /// Joins the states of ranks that have different tensors, such as the stages of a pipeline: afterwards a save, a
    /// load and a gather have the tensors of all ranks. Call it when everything is added. Give a parameter that several
    /// stages share the same name in each; the names of values must be the same on every rank. All ranks must call it.
    ///
    /// # Errors
    /// `Mismatch`: two ranks have the same name with different dtypes or shapes; `InvalidArgument`: parts of a tensor
    /// overlap on two ranks without being equal; `Timeout`, `Aborted`, `PeerLost`.
    pub fn join(&mut self, comm: &Comm) -> Result<()> {
        check(unsafe { sys::tsr_state_join(self.as_ptr()?, comm.as_ptr()) })
    }

    /// Gathers a complete tensor of which each rank holds a part, on `root` or on all ranks. Gathering all tensors one
    /// after the other gives the full state, without memory for all of them at once. All ranks must call it; ranks
    /// other than the root get `None`.
    ///
    /// # Errors
    /// `NotFound`: the tensor does not exist; `Mismatch`: the ranks name different tensors, or another rank lacks it;
    /// `InvalidArgument`: the root; `InvalidState`: a mutable view of something in the state is alive; `Timeout`,
    /// `Aborted`, `PeerLost`.
    pub fn gather(&self, comm: &Comm, name: &str, root: Option<usize>) -> Result<Option<Tensor>> {
        let c_name = raw::c_string("the name", name)?;
        let wanted = root.is_none() || root == Some(comm.rank()?);
        let found = if wanted { self.tensors()?.into_iter().find(|tensor| tensor.name == name) } else { None };
        let whole = found.map(|info| Tensor::zeros(info.dtype, &info.shape)).transpose()?;
        let memory = whole.as_ref().map(Tensor::as_raw);
        let root = root.map_or(Ok(-1), |root| raw::int32("root", root))?;
        self.reading(|state| {
            let out = memory.as_ref().map_or(ptr::null(), ptr::from_ref);
            check(unsafe { sys::tsr_state_gather(state, comm.as_ptr(), c_name.as_ptr(), root, out) })
        })?;
        Ok(whole)
    }

    fn as_ptr(&self) -> Result<*mut sys::tsr_state> {
        match (&self.error, self.handle) {
            (None, Some(handle)) => Ok(handle.as_ptr()),
            (Some(error), _) => Err(error.clone()),
            (None, None) => Err(Error::state("the state was never made")),
        }
    }

    /// Runs `body` while the library reads what the state holds.
    pub(crate) fn reading<R>(&self, body: impl FnOnce(*mut sys::tsr_state) -> Result<R>) -> Result<R> {
        self.access(Use::Reads, body)
    }

    /// Runs `body` while the library writes what the state holds.
    pub(crate) fn writing<R>(&mut self, body: impl FnOnce(*mut sys::tsr_state) -> Result<R>) -> Result<R> {
        self.access(Use::Writes, body)
    }

    fn access<R>(&self, how: Use, body: impl FnOnce(*mut sys::tsr_state) -> Result<R>) -> Result<R> {
        let state = self.as_ptr()?;
        let (mut tensors, mut samplers) = (Vec::new(), Vec::new());
        for kept in &self.kept {
            match kept {
                Kept::Tensor(name, tensor) => tensors.push((name.as_str(), tensor)),
                Kept::Ddp(inner) => tensors.extend(inner.group.named_params()),
                Kept::Fsdp(inner) => tensors.extend(inner.named_shards()), // the library loads into none that is whole
                Kept::TensorParallel(inner) => tensors.extend(inner.named_slices()),
                Kept::Engine(inner) => tensors.extend(inner.named_in_place()), // of others, as for an Fsdp
                // No view of what they have exists.
                Kept::Optimizer { .. } | Kept::GradScaler { .. } | Kept::LrSchedule { .. } | Kept::Metric { .. } => {}
                Kept::Sampler(inner) => samplers.push(inner),
            }
        }
        let _held = Held::new(tensors.into_iter(), how)?;
        // Each once and in one order everywhere, so that two states of two threads never wait for each other.
        samplers.sort_by_key(|inner| Arc::as_ptr(inner));
        samplers.dedup_by_key(|inner| Arc::as_ptr(inner));
        let _locked = samplers.iter().map(|inner| inner.lock()).collect::<Result<Vec<_>>>()?;
        body(state)
    }
}

impl fmt::Debug for State<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("objects", &self.kept.len()).field("error", &self.error).finish()
    }
}
