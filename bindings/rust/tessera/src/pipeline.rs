//! Pipeline-parallel training: the model is cut into stages, and a batch passes through them in micro-batches.

use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::panic;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::time::Duration;

use tessera_sys as sys;

use crate::callback::{answer_and_keep, CallbackResult, Failure, FAILED};
use crate::choices::{Creation, PipelineSchedule};
use crate::comm::{on_cpu, Borrowed, Comm, CudaTensor};
use crate::element::{DType, Element};
use crate::error::{check, Code, Error, Result};
use crate::raw::{self, created};
use crate::settings::{pipeline_setters, PipelineSettings};
use crate::tensor::{self, flat_shape, raw_tensor, slice, slice_mut, Held, Tensor, Use, ViewMut};

/// What a rank computes: the forwards and backwards of its stages, in the order of the schedule.
///
/// The methods run on the thread that called [`Pipeline::step`] or [`Pipeline::eval`]. A method's error or panic fails
/// the step on every rank, with the stage and the micro-batch in the message.
///
/// Implement `backward`, or `backward_input` and `backward_weight`: schedules that split backwards need these two, and
/// without a `backward` of your own the others call one after the other. Gradients of parameters are yours; add to them
/// in each backward.
pub trait Stages {
    /// Makes the outputs of a stage with [`StageCall::output`] from its inputs. On the last stage, it usually reports
    /// the [`loss`](StageCall::loss).
    ///
    /// # Errors
    /// Any; it fails the step.
    fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()>;

    /// Computes the gradients of the stage's inputs and adds to those of its parameters.
    ///
    /// # Errors
    /// Any; it fails the step.
    fn backward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        self.backward_input(call)?;
        self.backward_weight(call)
    }

    /// Computes the gradients of the inputs, for which the previous stage waits.
    ///
    /// # Errors
    /// Any; it fails the step. By default, that it is not implemented.
    fn backward_input(&mut self, _call: &StageCall<'_>) -> CallbackResult<()> {
        Err(lacking("backward_input"))
    }

    /// Adds to the gradients of the parameters, some time after `backward_input`.
    ///
    /// # Errors
    /// Any; it fails the step. By default, that it is not implemented.
    fn backward_weight(&mut self, _call: &StageCall<'_>) -> CallbackResult<()> {
        Err(lacking("backward_weight"))
    }
}

fn lacking(method: &str) -> Box<dyn std::error::Error + Send + Sync> {
    let advice = "implement it, or backward with a schedule that does not split backwards";
    Error::new(Code::Unsupported, format!("Stages::{method} is not implemented; {advice}")).into()
}

/// A tensor that the library lends to a method of [`Stages`]: contiguous, in row-major order.
#[repr(transparent)]
pub struct StageTensor(sys::tsr_tensor);

impl StageTensor {
    /// # Safety
    /// `tensors` are `n` contiguous tensors, whose memory nothing writes during `'a`.
    unsafe fn all<'a>(tensors: *const sys::tsr_tensor, n: usize) -> &'a [StageTensor] {
        // SAFETY: the caller's promise; the layouts are the same.
        unsafe { slice(tensors.cast(), n) }
    }

    /// The type of the elements.
    ///
    /// # Errors
    /// [`Code::Version`]: another rank has a newer library, with a type that this crate does not know.
    pub fn dtype(&self) -> Result<DType> {
        let dtype = self.0.dtype;
        DType::from_raw(dtype)
            .ok_or_else(|| Error::new(Code::Version, format!("a tensor has the unknown dtype {dtype}")))
    }

    fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        // SAFETY: a tensor's shape holds ndim numbers, for as long as the tensor is lent.
        let sizes = unsafe { slice(self.0.shape, usize::try_from(self.0.ndim).unwrap_or(0)) };
        sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0))
    }

    /// The sizes. The first one is the number of rows, in tensors of the batch and the targets.
    pub fn shape(&self) -> Vec<usize> {
        self.sizes().collect()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.sizes().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`]: they are not `T`, or they are on a device; [`Code::InvalidState`]: the gradient of an
    /// output that has none, because it is not floating-point.
    pub fn view<T: Element>(&self) -> Result<&[T]> {
        let (data, len) = self.elements::<T>()?;
        // SAFETY: as `all` promises, for as long as the tensor is borrowed.
        Ok(unsafe { slice(data, len) })
    }

    /// The bytes of the elements, whatever their type.
    ///
    /// # Errors
    /// [`Code::InvalidState`] and [`Code::Version`], as [`view`](Self::view) and [`dtype`](Self::dtype).
    pub fn bytes(&self) -> Result<&[u8]> {
        let len = self.len() * self.dtype()?.size();
        self.check_memory()?;
        self.check_on_cpu()?;
        // SAFETY: as `all` promises; every element type is plain data of that size.
        Ok(unsafe { slice(self.data(), len) })
    }

    /// Where the elements are, in a pipeline that is [on a device](PipelineBuilder::on_device). Kernels and operations on
    /// its stream ([`Pipeline::set_stream`]) may read them, until the backward of the micro-batch has returned.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`]: they are on the CPU; [`Code::InvalidState`] and [`Code::Version`], as
    /// [`view`](Self::view) and [`dtype`](Self::dtype).
    pub fn cuda(&self) -> Result<CudaTensor> {
        self.dtype()?;
        self.check_memory()?;
        // SAFETY: contiguous; whoever uses the address keeps to the time above.
        unsafe { Tensor::borrowed(&self.0) }?.cuda().ok_or_else(|| on_cpu(&"a tensor of this call", "view"))
    }

    fn check_on_cpu(&self) -> Result<()> {
        if self.0.device_type == sys::TSR_DEVICE_CPU {
            return Ok(());
        }
        let device = self.0.device_index;
        Err(Error::argument(format!("a tensor of this call is on CUDA device {device}: use cuda, or cuda_input_grad")))
    }

    fn data(&self) -> *mut u8 {
        self.0.data.cast::<u8>().wrapping_add(usize::try_from(self.0.byte_offset).unwrap_or(0))
    }

    /// Where the elements are, if they are `T`.
    fn elements<T: Element>(&self) -> Result<(*mut T, usize)> {
        if self.0.dtype != T::DTYPE.as_raw() {
            return Err(Error::argument(format!("the tensor's elements are {}, not {}", self.dtype()?, T::DTYPE)));
        }
        self.check_memory()?;
        self.check_on_cpu()?;
        let data = self.data().cast::<T>();
        if data.is_aligned() {
            Ok((data, self.len()))
        } else {
            Err(Error::new(Code::Internal, format!("the library lent {} at {data:?}, which is not aligned", T::DTYPE)))
        }
    }

    fn check_memory(&self) -> Result<()> {
        if self.0.data.is_null() && !self.is_empty() {
            return Err(Error::state(format!("a tensor of {} has no gradient", self.dtype()?)));
        }
        Ok(())
    }
}

impl fmt::Debug for StageTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype() {
            Ok(dtype) => write!(f, "StageTensor({dtype}, {:?})", self.shape()),
            Err(_) => write!(f, "StageTensor({}, {:?})", self.0.dtype, self.shape()),
        }
    }
}

/// What a method of [`Stages`] computes with. Everything in it is lent for the call; a backward gets the tensors of its
/// forward again, so nothing need be copied.
pub struct StageCall<'a> {
    raw: &'a sys::tsr_stage_call,
    pipeline: NonNull<sys::tsr_pipeline>,
    on_device: bool,
    /// Of the views of each input gradient.
    counters: &'a [Cell<isize>],
}

impl<'a> StageCall<'a> {
    /// The stage, from 0.
    pub fn stage(&self) -> usize {
        usize::try_from(self.raw.stage).unwrap_or(0)
    }

    /// The micro-batch, from 0.
    pub fn microbatch(&self) -> usize {
        usize::try_from(self.raw.microbatch).unwrap_or(0)
    }

    /// The number of micro-batches.
    pub fn microbatches(&self) -> usize {
        usize::try_from(self.raw.microbatches).unwrap_or(0)
    }

    /// Whether a backward follows: true in [`Pipeline::step`], false in [`Pipeline::eval`].
    pub fn is_training(&self) -> bool {
        self.raw.training != 0
    }

    /// Whether the gradients of this stage's parameters are complete for this step after this call. A
    /// [`Ddp`](crate::Ddp) or [`Fsdp`](crate::Fsdp) over the ranks that have this stage synchronises here: leave
    /// `set_sync(false)` until then.
    pub fn is_last_backward(&self) -> bool {
        self.raw.is_last_backward != 0
    }

    /// The factor of this micro-batch's loss, on the last stage; 0 on others. Scale the loss by it before its backward,
    /// never gradients afterwards, so that steps can be accumulated.
    pub fn weight(&self) -> f64 {
        self.raw.weight
    }

    /// The inputs. On stage 0, this micro-batch's rows of the batch; on others, what the previous stage sent, then what
    /// came along each edge that ends here, in the order of the edges.
    pub fn inputs(&self) -> &'a [StageTensor] {
        // SAFETY: lent for the call, which `'a` does not outlive; only gradients of inputs may be written. So below.
        unsafe { StageTensor::all(self.raw.inputs, self.raw.n_inputs) }
    }

    /// This micro-batch's rows of the targets; none if this is not the last stage.
    pub fn targets(&self) -> &'a [StageTensor] {
        unsafe { StageTensor::all(self.raw.targets, self.raw.n_targets) }
    }

    /// What the forward made; none in a forward.
    pub fn outputs(&self) -> &'a [StageTensor] {
        unsafe { StageTensor::all(self.raw.outputs, self.raw.n_outputs) }
    }

    /// In a backward: the gradients of the outputs that went to the next stage, then of each edge that begins here. An
    /// output that is not `f16`, `bf16`, `f32` or `f64` has none: its view is an error. None on the last stage.
    pub fn output_grads(&self) -> &'a [StageTensor] {
        unsafe { StageTensor::all(self.raw.output_grads, self.raw.n_output_grads) }
    }

    /// Whether input `index` has a gradient, to be written in this call: in `backward` and `backward_input`, except on
    /// stage 0, if the input is `f16`, `bf16`, `f32` or `f64`.
    pub fn has_input_grad(&self, index: usize) -> bool {
        self.input_grads().get(index).is_some_and(|grad| !grad.0.data.is_null())
    }

    /// The gradient of input `index`, to be written. It has the input's shape, and is zero at first.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`]: there is no such gradient (see [`has_input_grad`](Self::has_input_grad)), or it is
    /// not `T`; [`Code::InvalidState`]: another view of it is alive.
    pub fn input_grad_mut<T: Element>(&self, index: usize) -> Result<ViewMut<'a, T>> {
        let (grad, counter) = self.input_grad(index)?;
        let (data, len) = grad.elements()?;
        // SAFETY: lent for the call; what is here is the only access to it, and each gradient has its own memory.
        unsafe { tensor::view_mut(data, len, counter) }
    }

    /// The gradient of input `index`, in a pipeline that is [on a device](PipelineBuilder::on_device): to be written on its
    /// stream ([`Pipeline::set_stream`]), in this call. It has the input's shape, and is zero at first.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`]: there is no such gradient, or it is on the CPU.
    pub fn cuda_input_grad(&self, index: usize) -> Result<CudaTensor> {
        self.input_grad(index)?.0.cuda()
    }

    fn input_grad(&self, index: usize) -> Result<(&'a StageTensor, &'a Cell<isize>)> {
        let (Some(grad), Some(counter)) = (self.input_grads().get(index), self.counters.get(index)) else {
            let (stage, n) = (self.stage(), self.raw.n_input_grads);
            return Err(Error::argument(format!(
                "there is no gradient of input {index} here: stage {stage} has {n} of them in this call"
            )));
        };
        if !self.has_input_grad(index) {
            return Err(Error::argument(format!("input {index} has no gradient: it is {}", grad.dtype()?)));
        }
        Ok((grad, counter))
    }

    /// Not public: its tensors must not be viewed while they may be written.
    fn input_grads(&self) -> &'a [StageTensor] {
        unsafe { StageTensor::all(self.raw.input_grads, self.raw.n_input_grads) }
    }

    /// In a forward: memory for the next output of the stage, with unspecified content, aligned to 4096 bytes. The
    /// first call makes output 0. Number, types and shapes may differ between micro-batches.
    ///
    /// # Errors
    /// [`Code::InvalidState`]: not in a forward; [`Code::InvalidArgument`]: larger than
    /// [`max_message_bytes`](PipelineBuilder::max_message_bytes), or too many dimensions; [`Code::NoMemory`].
    pub fn output<T: Element>(&self, shape: impl AsRef<[usize]>) -> Result<&'a mut [T]> {
        let bytes = self.output_bytes(T::DTYPE, shape)?;
        // SAFETY: so many elements, aligned to a page; every bit pattern is a value of `T`.
        Ok(unsafe { slice_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) })
    }

    /// [`output`](Self::output) of any type, as bytes.
    ///
    /// # Errors
    /// The same errors.
    pub fn output_bytes(&self, dtype: DType, shape: impl AsRef<[usize]>) -> Result<&'a mut [u8]> {
        if self.on_device {
            return Err(Error::argument("the pipeline is on a CUDA device: use cuda_output"));
        }
        let tensor = self.new_output(dtype, shape)?;
        // SAFETY: the library has just made it, and nobody else has it until the call ends. It maps pages, which are
        // zero, and uses them again: every byte is initialized.
        Ok(unsafe { slice_mut(tensor.data(), tensor.len() * dtype.size()) })
    }

    /// [`output`](Self::output) in a pipeline that is [on a device](PipelineBuilder::on_device), to be written on its stream
    /// ([`Pipeline::set_stream`]), in this call.
    ///
    /// # Errors
    /// The same errors; [`Code::InvalidArgument`]: the pipeline is on the CPU.
    pub fn cuda_output(&self, dtype: DType, shape: impl AsRef<[usize]>) -> Result<CudaTensor> {
        if !self.on_device {
            return Err(on_cpu(&"an output", "output"));
        }
        self.new_output(dtype, shape)?.cuda()
    }

    fn new_output(&self, dtype: DType, shape: impl AsRef<[usize]>) -> Result<StageTensor> {
        let sizes = shape.as_ref().iter().map(|&size| raw::int64("a size", size)).collect::<Result<Vec<_>>>()?;
        let (ndim, pipeline) = (raw::int32("the number of dimensions", sizes.len())?, self.pipeline.as_ptr());
        // SAFETY: a plain struct of which zero is a value. The pipeline is the one that called back, on this thread.
        unsafe {
            let mut tensor: sys::tsr_tensor = std::mem::zeroed();
            check(sys::tsr_pipeline_output(pipeline, dtype.as_raw(), sizes.as_ptr(), ndim, &mut tensor))?;
            Ok(StageTensor(tensor))
        }
    }

    /// On the last stage: reports the loss of this micro-batch, without its [`weight`](Self::weight). The last value
    /// counts.
    ///
    /// # Errors
    /// [`Code::InvalidState`]: this is not the last stage.
    pub fn loss(&self, loss: f64) -> Result<()> {
        // SAFETY: the pipeline is the one that called back, on this thread.
        check(unsafe { sys::tsr_pipeline_loss(self.pipeline.as_ptr(), loss) })
    }
}

impl fmt::Debug for StageCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StageCall")
            .field("stage", &self.stage())
            .field("microbatch", &self.microbatch())
            .finish_non_exhaustive()
    }
}

/// What the callbacks of a step or evaluation use. A local variable of `Pipeline::run`.
struct Pass<'s> {
    pipeline: NonNull<sys::tsr_pipeline>,
    on_device: bool,
    stages: &'s mut dyn Stages,
    /// Why the arguments cannot be used. The first callback returns it, so that no other rank waits for this one.
    refused: Option<Error>,
    failure: Option<Failure>,
}

/// What the library passes to the callbacks: the address of the current [`Pass`], or null.
type Slot = Cell<*mut c_void>;

unsafe extern "C" fn on_call(call: *const sys::tsr_stage_call, message: *mut c_char, user_data: *mut c_void) -> i32 {
    // SAFETY: the slot lives as long as the pipeline that calls.
    let current = unsafe { &*user_data.cast_const().cast::<Slot>() }.get().cast::<Pass<'_>>();
    if current.is_null() {
        return FAILED;
    }
    // SAFETY: the library calls on the thread that waits in `Pipeline::run`, whose pass nothing else uses meanwhile: the
    // library calls no second time before this returns. The call is lent until then.
    let (pass, raw) = unsafe { (&mut *current, &*call) };
    let (stages, refused) = (&mut *pass.stages, pass.refused.take());
    let (pipeline, on_device) = (pass.pipeline, pass.on_device);
    let body = || {
        if let Some(refused) = refused {
            return Err(refused.into());
        }
        let counters: Vec<Cell<isize>> = (0..raw.n_input_grads).map(|_| Cell::new(0)).collect();
        let call = StageCall { raw, pipeline, on_device, counters: &counters };
        match raw.work {
            sys::TSR_STAGE_FORWARD => stages.forward(&call),
            sys::TSR_STAGE_BACKWARD => stages.backward(&call),
            sys::TSR_STAGE_BACKWARD_INPUT => stages.backward_input(&call),
            sys::TSR_STAGE_BACKWARD_WEIGHT => stages.backward_weight(&call),
            other => Err(Error::new(Code::Version, format!("the library asks for the unknown work {other}")).into()),
        }
    };
    // SAFETY: the library's buffer for messages.
    unsafe { answer_and_keep(message, &mut pass.failure, body) }
}

/// Builds a [`Pipeline`]. Settings that are not set have the library's defaults. The same on every rank, except for the
/// stages.
#[must_use = "it is a builder: call build()"]
pub struct PipelineBuilder<'c> {
    comm: &'c Comm,
    stages: Vec<usize>,
    edges: Vec<[usize; 3]>,
    settings: PipelineSettings,
}

impl<'c> PipelineBuilder<'c> {
    pipeline_setters!();

    /// Adds a connection that skips stages, from output `output` (counted from 0) of `from_stage` to `to_stage`. The
    /// output goes only along its edges; outputs without an edge go to the next stage. Add an edge for each stage that
    /// takes the output, the next one included.
    pub fn edge(mut self, from_stage: usize, output: usize, to_stage: usize) -> Self {
        self.edges.push([from_stage, output, to_stage]);
        self
    }

    /// Joins the stages of all ranks to a pipeline. Collective. The pipeline uses its own communicator, so collectives
    /// of the builder's may run meanwhile, in callbacks too.
    ///
    /// # Errors
    /// `InvalidArgument`, on every rank: stages are missing, on two ranks or on the wrong one, the number of
    /// micro-batches does not suit the schedule, or an edge; the message says which, and what works. `Mismatch`: the
    /// ranks' settings differ; `Unsupported`, `Timeout`, `Aborted`, `PeerLost`, `NoMemory`; those of
    /// [`load`](crate::load).
    pub fn build(self) -> Result<Pipeline<'c>> {
        crate::load()?;
        let stages = numbers(&self.stages);
        let edges = self.edges.iter().map(|edge| {
            let [from_stage, output, to_stage] = edge.map(number);
            sys::tsr_pipeline_edge { from_stage, output, to_stage, reserved: 0 }
        });
        let edges: Vec<_> = edges.collect();
        let slot = Rc::new(Slot::new(ptr::null_mut()));
        let callbacks = sys::tsr_pipeline_callbacks {
            struct_size: size_of::<sys::tsr_pipeline_callbacks>(),
            forward: Some(on_call),
            backward: Some(on_call),
            backward_input: Some(on_call),
            backward_weight: Some(on_call),
            destroy: None,
            user_data: Rc::as_ptr(&slot).cast_mut().cast(),
        };
        let mut handle = ptr::null_mut();
        self.comm.creating(Creation::Pipeline, |reached| {
            self.settings.with_raw(|raw| {
                (raw.edges, raw.edge_count) = (edges.as_ptr(), edges.len());
                reached.set(true);
                // SAFETY: all is borrowed for the call, except for the communicator, which the new object borrows, and
                // the slot, which it keeps.
                check(unsafe {
                    let comm = self.comm.as_ptr();
                    sys::tsr_pipeline_create(comm, stages.as_ptr(), stages.len(), &callbacks, raw, &mut handle)
                })
            })
        })?;
        let (handle, on_device) = (created(handle)?, self.settings.on_device.unwrap_or(false));
        let mut pipeline =
            Pipeline { handle, slot, on_device, microbatches: 0, stage_count: 0, _comm: Borrowed::new() };
        let (mut microbatches, mut stage_count) = (0, 0);
        // SAFETY: the handle is alive; both are for the library to write.
        unsafe {
            check(sys::tsr_pipeline_microbatches(pipeline.handle.as_ptr(), &mut microbatches))?;
            check(sys::tsr_pipeline_stages(pipeline.handle.as_ptr(), &mut stage_count))?;
        }
        pipeline.microbatches = usize::try_from(microbatches).unwrap_or(0);
        pipeline.stage_count = usize::try_from(stage_count).unwrap_or(0);
        Ok(pipeline)
    }
}

impl fmt::Debug for PipelineBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (stages, edges, settings) = (&self.stages, &self.edges, &self.settings);
        let mut shown = f.debug_struct("PipelineBuilder");
        shown.field("stages", stages).field("edges", edges).field("settings", settings).finish_non_exhaustive()
    }
}

/// A number that is too large becomes one that the library refuses, on every rank.
fn number(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

fn numbers(values: &[usize]) -> Vec<i32> {
    values.iter().map(|&value| number(value)).collect()
}

/// Statistics of the last step or evaluation on this rank; zeros and `None` before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PipelineStats {
    /// From the beginning to the end of the call.
    pub wall: Duration,
    /// Time in the methods of [`Stages`].
    pub busy: Duration,
    /// Time that this rank waited for messages and, at the end, for the other ranks.
    pub waited: Duration,
    /// The part of `waited` for the stage whose messages this rank awaited longest.
    pub longest: Duration,
    /// That stage; `None`: this rank awaited none.
    pub longest_stage: Option<usize>,
    /// The rank that has that stage.
    pub longest_rank: Option<usize>,
    /// The most micro-batches of a stage that were between their forward and backward at once.
    pub peak_activations: usize,
    /// The most memory of the library that tensors were in at once.
    pub peak_bytes: usize,
}

/// A model that is cut into stages, of which each rank has one or more. The trainer computes, in the methods of
/// [`Stages`]; the pipeline calls them in the order of the schedule, moves activations and gradients between the
/// stages, and keeps what a backward needs.
///
/// Every rank calls [`step`](Self::step) with its stages, then makes the optimizer's step. The batch is needed on the
/// rank of stage 0, the targets on the rank of the last stage.
///
/// A failure on one rank ends the step on every rank, within the communicator's timeout; all later calls are
/// [`Code::Aborted`] with that error as the cause.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{CallbackResult, Comm, Pipeline, PipelineSchedule, StageCall, Stages, Tensor};
///
/// /// A stage that multiplies by its weight. The loss is the mean of the squared errors.
/// struct Layer {
///     weight: f64,
///     grad: f64,
/// }
///
/// impl Stages for Layer {
///     fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
///         let x: &[f64] = call.inputs()[0].view()?;
///         let y = call.output::<f64>(call.inputs()[0].shape())?;
///         y.iter_mut().zip(x).for_each(|(y, x)| *y = self.weight * x);
///         if let [targets] = call.targets() {
///             let squares = y.iter().zip(targets.view::<f64>()?).map(|(y, t)| (y - t) * (y - t));
///             call.loss(squares.sum::<f64>() / x.len() as f64)?;
///         }
///         Ok(())
///     }
///
///     fn backward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
///         let x: &[f64] = call.inputs()[0].view()?;
///         let dy: Vec<f64> = if let [targets] = call.targets() {
///             let scale = 2.0 * call.weight() / x.len() as f64;
///             let y: &[f64] = call.outputs()[0].view()?;
///             y.iter().zip(targets.view::<f64>()?).map(|(y, t)| scale * (y - t)).collect()
///         } else {
///             call.output_grads()[0].view()?.to_vec()
///         };
///         self.grad += dy.iter().zip(x).map(|(dy, x)| dy * x).sum::<f64>();
///         if call.has_input_grad(0) {
///             let mut dx = call.input_grad_mut::<f64>(0)?;
///             dx.iter_mut().zip(&dy).for_each(|(dx, dy)| *dx = self.weight * dy);
///         }
///         Ok(())
///     }
/// }
///
/// let comm = Comm::from_env()?;
/// let mut layer = Layer { weight: 0.9, grad: 0.0 };
/// let mut pipe = Pipeline::builder(&comm, &[comm.rank()?]) // one stage per rank
///     .schedule(PipelineSchedule::OneFOneB)
///     .microbatches(4)
///     .build()?;
/// let batch = [Tensor::new((0..10).map(f64::from).collect(), [10, 1])?]; // [rows, ...]; used by stage 0
/// let targets = [Tensor::new((0..10).map(|x| 2.0 * f64::from(x)).collect(), [10, 1])?]; // by the last stage
/// for _ in 0..50 {
///     let losses = pipe.step(&mut layer, &batch, &targets)?; // of the micro-batches: 3, 3, 2 and 2 rows
///     assert_eq!(losses.len(), 4);
///     layer.weight -= 0.01 * layer.grad;
///     layer.grad = 0.0;
/// }
/// assert!(pipe.eval(&mut layer, &batch, &targets)?[3] < 1e-6);
/// # Ok(()) }
/// ```
pub struct Pipeline<'c> {
    handle: NonNull<sys::tsr_pipeline>,
    /// Dropped after the handle, which calls back with it.
    slot: Rc<Slot>,
    on_device: bool,
    microbatches: usize,
    stage_count: usize,
    _comm: Borrowed<'c>,
}

type Run = unsafe fn(
    *mut sys::tsr_pipeline,
    *const sys::tsr_tensor,
    usize,
    *const sys::tsr_tensor,
    usize,
    *const f64,
    usize,
    *mut f64,
    usize,
) -> sys::tsr_status;

impl<'c> Pipeline<'c> {
    /// Starts building a pipeline in which this rank has `stages`, one or more of the numbers from 0, in any order. All
    /// ranks together name each stage once, where the schedule puts it. Finish with `build()`.
    pub fn builder(comm: &'c Comm, stages: &[usize]) -> PipelineBuilder<'c> {
        PipelineBuilder { comm, stages: stages.to_vec(), edges: Vec::new(), settings: PipelineSettings::default() }
    }

    /// The number of micro-batches.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// The number of stages of all ranks together.
    pub fn stage_count(&self) -> usize {
        self.stage_count
    }

    /// Trains on one batch: forward and backward of all micro-batches. Returns the loss of each micro-batch as the last
    /// stage reported it, NaN if it reported none; the same on every rank. Collective.
    ///
    /// `batch` and `targets` are tensors with the same number of rows each, cut along their first dimension into
    /// micro-batches, like `torch.tensor_split`: micro-batches need not divide the rows. The rank of stage 0 uses the
    /// batch, the rank of the last stage the targets; other ranks may pass none, as may these if `stages` have their
    /// own. In a pipeline that is [on a device](PipelineBuilder::on_device) they may be there, made of [`CudaTensor`]s, whose
    /// memory must stay until the stream has done what the methods put there. The weight of a micro-batch's loss is its share of the targets' rows, or 1 / m without targets, so that a
    /// loss which is a mean over rows stays one.
    ///
    /// # Errors
    /// A method's own error on its rank, as [`CallbackResult`] says, with that error as the
    /// [`source`](std::error::Error::source); `Aborted`: another rank failed; `InvalidArgument`: fewer rows than
    /// micro-batches; `InvalidState`: a mutable view of a tensor is alive; `Timeout`: names the stage that did not
    /// send; `PeerLost`, `Mismatch`, `Corrupt`, `NoMemory`; `Interrupted`, which fails the step.
    ///
    /// # Panics
    /// If a method has panicked; the step has then failed on every rank.
    pub fn step(&mut self, stages: &mut dyn Stages, batch: &[Tensor], targets: &[Tensor]) -> Result<Vec<f64>> {
        self.run(sys::tsr_pipeline_step, stages, batch, targets, &[])
    }

    /// [`Pipeline::step`] with your own factors of the micro-batches' losses, one for each micro-batch. The rank of the
    /// last stage uses them; others may pass none.
    ///
    /// # Errors
    /// The same errors; `InvalidArgument`: `weights` are neither none nor as many as there are micro-batches.
    ///
    /// # Panics
    /// If a method has panicked.
    pub fn step_weighted(
        &mut self,
        stages: &mut dyn Stages,
        batch: &[Tensor],
        targets: &[Tensor],
        weights: &[f64],
    ) -> Result<Vec<f64>> {
        self.run(sys::tsr_pipeline_step, stages, batch, targets, weights)
    }

    /// Evaluates one batch: the forwards of a [`step`](Self::step), in the same order. Ranks that are ahead do not
    /// wait: a slow last stage may have all activations of the batch in memory. Collective.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    ///
    /// # Panics
    /// If a method has panicked.
    pub fn eval(&mut self, stages: &mut dyn Stages, batch: &[Tensor], targets: &[Tensor]) -> Result<Vec<f64>> {
        self.run(sys::tsr_pipeline_eval, stages, batch, targets, &[])
    }

    fn run(
        &mut self,
        run: Run,
        stages: &mut dyn Stages,
        batch: &[Tensor],
        targets: &[Tensor],
        weights: &[f64],
    ) -> Result<Vec<f64>> {
        let batch_and_targets = batch
            .iter()
            .map(|tensor| ("the batch", tensor))
            .chain(targets.iter().map(|tensor| ("the targets", tensor)));
        // So that callbacks get no view with which they could write to what the library reads and lends.
        let held = Held::new(batch_and_targets, Use::Reads);
        let (_held, refused) = match held {
            Ok(held) => (Some(held), None),
            Err(error) => (None, Some(error)),
        };
        let lent = |tensors: &[Tensor]| -> Vec<sys::tsr_tensor> {
            let tensors = if refused.is_none() { tensors } else { &[] };
            tensors.iter().map(Tensor::as_raw).collect()
        };
        let (inputs, goals) = (lent(batch), lent(targets));
        let factors = if weights.is_empty() { ptr::null() } else { weights.as_ptr() };
        let mut losses = vec![f64::NAN; self.microbatches];
        let mut pass = Pass { pipeline: self.handle, on_device: self.on_device, stages, refused, failure: None };
        self.slot.set(ptr::from_mut(&mut pass).cast());
        // SAFETY: the handle is alive and used by this thread alone. The tensors are held.
        let result = check(unsafe {
            run(
                self.handle.as_ptr(),
                inputs.as_ptr(),
                inputs.len(),
                goals.as_ptr(),
                goals.len(),
                factors,
                weights.len(),
                losses.as_mut_ptr(),
                losses.len(),
            )
        });
        self.slot.set(ptr::null_mut());
        match pass.failure {
            Some(Failure::Panic(payload)) => panic::resume_unwind(payload),
            Some(Failure::Error(own)) => result.map_err(|error| error.caused_by(own))?,
            None => result?,
        }
        Ok(losses)
    }

    /// After a step: sums the gradient of a parameter that several stages share, such as an embedding that is also the
    /// output layer. Collective over the ranks that have one of `stages`: each calls it once for each such parameter,
    /// in the same order; no other rank does. `gradient` becomes the sum over these ranks, added in the order of the
    /// stages. A rank that has several of the stages has one gradient for them.
    ///
    /// `stages` are in ascending order, the same on every rank; `gradient` is floating-point, with the same number of
    /// elements on every rank.
    ///
    /// # Errors
    /// `InvalidArgument`, `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, `NoMemory`, `Interrupted`. Any of them ends the
    /// pipeline, as one of a step does.
    pub fn sum_tied<T: Element>(&mut self, gradient: &mut [T], stages: &[usize]) -> Result<()> {
        let (shape, stages) = (flat_shape(gradient.len()), numbers(stages));
        let tensor = raw_tensor(gradient.as_mut_ptr().cast(), &shape, T::DTYPE);
        // SAFETY: the handle is alive and used by this thread alone; the rest is borrowed for the call.
        check(unsafe { sys::tsr_pipeline_sum_tied(self.handle.as_ptr(), &tensor, stages.as_ptr(), stages.len()) })
    }

    /// [`sum_tied`](Self::sum_tied) of a gradient on the pipeline's device. It is summed on the host: the call waits for the
    /// stream.
    ///
    /// # Errors
    /// The same errors; `Cuda`.
    pub fn cuda_sum_tied(&mut self, gradient: &CudaTensor, stages: &[usize]) -> Result<()> {
        let stages = numbers(stages);
        // SAFETY: the handle is alive and used by this thread alone; whoever made the tensor keeps its memory.
        gradient.with_raw(|raw| {
            check(unsafe { sys::tsr_pipeline_sum_tied(self.handle.as_ptr(), raw, stages.as_ptr(), stages.len()) })
        })
    }

    /// Names the CUDA stream on which the methods of [`Stages`] compute, in a pipeline that is [on a
    /// device](PipelineBuilder::on_device): they put their work there and return. A new stream continues after what the
    /// previous one had.
    ///
    /// # Errors
    /// `InvalidArgument`: the stream is of another device, or the pipeline is on the CPU.
    ///
    /// # Safety
    /// `stream` is a CUDA stream (`cudaStream_t`), or null for the default one, as at first. It exists until another one is
    /// set or the pipeline is dropped.
    pub unsafe fn set_stream(&mut self, stream: *mut c_void) -> Result<()> {
        check(unsafe { sys::tsr_pipeline_set_stream(self.handle.as_ptr(), stream) })
    }

    /// Statistics of the last step or evaluation on this rank.
    ///
    /// # Errors
    /// None in practice.
    pub fn stats(&self) -> Result<PipelineStats> {
        // SAFETY: a plain struct of which zero is a value; the handle is alive and used by this thread alone.
        let raw = unsafe {
            let mut raw: sys::tsr_pass_stats = std::mem::zeroed();
            raw.struct_size = size_of::<sys::tsr_pass_stats>();
            check(sys::tsr_pipeline_stats(self.handle.as_ptr(), &mut raw))?;
            raw
        };
        let time = |nanos: i64| Duration::from_nanos(u64::try_from(nanos).unwrap_or(0));
        let longest_stage = usize::try_from(raw.longest_stage).ok();
        Ok(PipelineStats {
            wall: time(raw.wall_ns),
            busy: time(raw.busy_ns),
            waited: time(raw.waited_ns),
            longest: time(raw.longest_ns),
            longest_stage,
            longest_rank: longest_stage.and(usize::try_from(raw.longest_rank).ok()),
            peak_activations: raw.peak_activations,
            peak_bytes: raw.peak_bytes,
        })
    }
}

impl Drop for Pipeline<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again; no callback runs, because a step borrows the pipeline.
        unsafe { sys::tsr_pipeline_destroy(self.handle.as_ptr()) }
    }
}

impl fmt::Debug for Pipeline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline").field("microbatches", &self.microbatches).finish_non_exhaustive()
    }
}
