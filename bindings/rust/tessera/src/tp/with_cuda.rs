//! A tensor-parallel model, and its activations, on a CUDA device.

use std::ffi::{c_char, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use tessera_sys as sys;

use super::regions::{c_dim, in_calls, optional, PartCall};
use super::{CrossEntropy, TensorParallel};
use crate::callback::{answer_and_keep, CallbackResult};
use crate::comm::{on_cpu, Comm, CudaTensor};
use crate::error::{check, Error, Result};
use crate::params::GradientOf;
use crate::raw;
use crate::tensor::Tensor;
use crate::work::{Views, Work};

/// The operations of a [`TensorParallel`] on a CUDA stream; see [`TensorParallel::on_stream`].
#[derive(Clone, Copy)]
pub struct TpOnStream<'a> {
    tp: &'a TensorParallel<'a>,
    stream: *mut c_void,
}

/// The operations of a [`TensorParallel`] after a CUDA stream; see [`TensorParallel::after_stream`].
#[derive(Clone, Copy)]
pub struct TpAfterStream<'a> {
    tp: &'a TensorParallel<'a>,
    stream: *mut c_void,
}

impl fmt::Debug for TpOnStream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TpOnStream").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl fmt::Debug for TpAfterStream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TpAfterStream").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// # On a CUDA device
/// The parameters are all on the CPU, or all on the communicator's device: [`CudaTensor`]s, [`Tensor::deferred_on`]. Slices
/// and gradients are then there too. Activations on a device are [`CudaTensor`]s.
impl<'c> TensorParallel<'c> {
    /// This rank's slice of parameter `index` where it is on a device. It stays there as long as the model and its
    /// optimizers.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist, or it is on the CPU.
    pub fn cuda_slice(&self, index: usize) -> Result<CudaTensor> {
        let param = self.inner.param(index)?;
        param.slice.cuda().ok_or_else(|| on_cpu(&format_args!("slice of {}", param.name), "slice"))
    }

    /// The gradient of this rank's slice of parameter `index` where it is on a device; initially zero.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist, or it is on the CPU; `InvalidState`: it is not a floating-point
    /// parameter; `NoMemory`.
    pub fn cuda_grad(&self, index: usize) -> Result<CudaTensor> {
        let grad = self.inner.grad(index)?.cuda();
        grad.ok_or_else(|| self.inner.param(index).map_or_else(|error| error, |p| on_cpu(&GradientOf(&p.name), "grad")))
    }

    /// Names the CUDA stream in whose order [`sum_grads`](Self::sum_grads) and [`zero_grad`](Self::zero_grad) run, for
    /// parameters on a device: that of the backward pass and of the optimizer. A new stream continues after what the previous
    /// one had.
    ///
    /// # Errors
    /// `InvalidArgument`: the stream is of another device, or the parameters are on the CPU.
    ///
    /// # Safety
    /// `stream` is a CUDA stream (`cudaStream_t`), or null for the default one, as at first. It exists until another one is
    /// set or the model is dropped.
    pub unsafe fn set_stream(&mut self, stream: *mut c_void) -> Result<()> {
        check(unsafe { sys::tsr_tp_set_stream(self.inner.as_ptr(), stream) })
    }

    /// Operations on activations of the device in the order of a stream: each returns once it is on the stream, and what
    /// the stream gets later sees the result.
    ///
    /// # Safety
    /// `stream` is a CUDA stream of this rank's device (`cudaStream_t`) as long as what is returned is used, or null for
    /// the default stream. Kernels that use slices and gradients meanwhile are ordered with it.
    pub unsafe fn on_stream(&self, stream: *mut c_void) -> TpOnStream<'_> {
        TpOnStream { tp: self, stream }
    }

    /// The same operations after what a stream has now: each returns a [`Work`] that is done when the device is.
    /// [`Work::order`] makes a stream wait for it.
    ///
    /// # Safety
    /// As for [`TensorParallel::on_stream`].
    pub unsafe fn after_stream(&self, stream: *mut c_void) -> TpAfterStream<'_> {
        TpAfterStream { tp: self, stream }
    }

    fn views_of<'a>(&self, tensors: impl IntoIterator<Item = &'a CudaTensor>) -> Views {
        let views = Views::default().keep(Arc::clone(&self.inner.handle));
        tensors.into_iter().fold(views, |views, tensor| tensor.clone().into_views(views))
    }
}

impl TpOnStream<'_> {
    fn issue(
        &self,
        views: Views,
        call: impl FnOnce(&[sys::tsr_tensor], *mut *mut sys::tsr_work) -> sys::tsr_status,
    ) -> Result<()> {
        check(call(views.tensors(), ptr::null_mut()))
    }

    /// [`TensorParallel::enter_parts`] on the stream: `compute` is called while earlier parts are computed, and puts what it
    /// does onto the stream, in whose order the part is there.
    ///
    /// # Errors
    /// See [Activations](TensorParallel#activations); and that of `compute`, with its code.
    pub fn enter_parts(
        &self,
        input: &CudaTensor,
        output: &CudaTensor,
        dim: usize,
        compute: impl FnMut(usize, &CudaTensor) -> CallbackResult<()>,
    ) -> Result<()> {
        let (views, dim) = (self.tp.views_of([input, output]), c_dim(Some(dim))?);
        let (tp, t) = (self.tp.inner.as_ptr(), views.tensors());
        // SAFETY: the handle is alive and used by this thread alone; whoever made the tensors keeps their memory.
        in_parts(compute, |on_part, call| unsafe {
            sys::tsr_tp_enter_parts(tp, &t[0], dim, &t[1], self.stream, on_part, call)
        })
    }

    /// [`TensorParallel::leave_parts`] on the stream: `compute` writes each part by what it puts onto the stream. `size` is
    /// that of the complete activation along `dim`.
    ///
    /// # Errors
    /// See [Activations](TensorParallel#activations); and that of `compute`, with its code.
    pub fn leave_parts(
        &self,
        output: &CudaTensor,
        size: usize,
        dim: usize,
        bias: Option<&CudaTensor>,
        compute: impl FnMut(usize, &CudaTensor) -> CallbackResult<()>,
    ) -> Result<()> {
        let views = self.tp.views_of(std::iter::once(output).chain(bias));
        let (size, dim) = (raw::int64("the size", size)?, c_dim(Some(dim))?);
        let (tp, t) = (self.tp.inner.as_ptr(), views.tensors());
        // SAFETY: as in `enter_parts`.
        in_parts(compute, |on_part, call| unsafe {
            sys::tsr_tp_leave_parts(tp, size, dim, optional(t.get(1)), &t[0], self.stream, on_part, call)
        })
    }

    /// [`TensorParallel::split`] on the stream. Not collective.
    ///
    /// # Errors
    /// `InvalidArgument`: the shapes do not belong together, or there is no dimension `dim`; `Cuda`.
    pub fn split(&self, input: &CudaTensor, output: &CudaTensor, dim: usize) -> Result<()> {
        let dim = c_dim(Some(dim))?;
        // SAFETY: as in `enter_parts`.
        self.issue(self.tp.views_of([input, output]), |t, _| unsafe {
            sys::tsr_tp_split(self.tp.inner.as_ptr(), &t[0], dim, &t[1], self.stream)
        })
    }
}

impl TpAfterStream<'_> {
    fn issue(
        &self,
        views: Views,
        call: impl FnOnce(&[sys::tsr_tensor], *mut *mut sys::tsr_work) -> sys::tsr_status,
    ) -> Result<Work<()>> {
        // SAFETY: the call starts one operation on these views; whoever made the tensors keeps their memory.
        unsafe { Work::start((), views, call) }
    }
}

unsafe extern "C" fn on_part<F: FnMut(usize, &CudaTensor) -> CallbackResult<()>>(
    begin: i64,
    part: *const sys::tsr_tensor,
    message: *mut c_char,
    call: *mut c_void,
) -> i32 {
    // SAFETY: `in_parts` passes this object, which nothing else uses meanwhile; the library passes a tensor, and its buffer
    // for messages.
    unsafe {
        let (call, part) = (&mut *call.cast::<PartCall<F>>(), &*part);
        let compute = &mut call.compute;
        answer_and_keep(message, &mut call.failure, || {
            let view = Tensor::borrowed(part)?.cuda().ok_or_else(|| Error::argument("the part is not on a device"))?;
            compute(usize::try_from(begin).unwrap_or(0), &view)
        })
    }
}

fn in_parts<F: FnMut(usize, &CudaTensor) -> CallbackResult<()>>(
    compute: F,
    run: impl FnOnce(sys::tsr_tp_part_fn, *mut c_void) -> sys::tsr_status,
) -> Result<()> {
    in_calls(compute, |call| run(Some(on_part::<F>), call))
}

macro_rules! operations {
    ($name:ident, $result:ty) => {
        /// Shapes are those of the tensors. Errors: see [Activations](TensorParallel#activations);
        /// [`Code::InvalidArgument`](crate::Code::InvalidArgument) also for a tensor or a stream of another device,
        /// [`Code::Unsupported`](crate::Code::Unsupported) where kernels are needed and there are none,
        /// [`Code::Cuda`](crate::Code::Cuda), [`Code::Nccl`](crate::Code::Nccl).
        #[allow(clippy::missing_errors_doc)]
        impl $name<'_> {
            /// See [`TensorParallel::enter`].
            pub fn enter(&self, input: &CudaTensor, output: &CudaTensor, dim: Option<usize>) -> Result<$result> {
                let dim = c_dim(dim)?;
                // SAFETY: the views live as long as the operation; so below.
                self.issue(self.tp.views_of([input, output]), |t, work| unsafe {
                    sys::tsr_tp_enter(self.tp.inner.as_ptr(), &t[0], dim, &t[1], self.stream, work)
                })
            }

            /// See [`TensorParallel::enter_backward`]; without `dim`, `output` may be `grad`.
            pub fn enter_backward(
                &self,
                grad: &CudaTensor,
                output: &CudaTensor,
                dim: Option<usize>,
            ) -> Result<$result> {
                let dim = c_dim(dim)?;
                self.issue(self.tp.views_of([grad, output]), |t, work| unsafe {
                    sys::tsr_tp_enter_backward(self.tp.inner.as_ptr(), &t[0], dim, &t[1], self.stream, work)
                })
            }

            /// See [`TensorParallel::leave`]; without `dim`, `output` may be `input`.
            pub fn leave(
                &self,
                input: &CudaTensor,
                output: &CudaTensor,
                dim: Option<usize>,
                bias: Option<&CudaTensor>,
            ) -> Result<$result> {
                let dim = c_dim(dim)?;
                self.issue(self.tp.views_of([input, output].into_iter().chain(bias)), |t, work| unsafe {
                    let (tp, bias) = (self.tp.inner.as_ptr(), optional(t.get(2)));
                    sys::tsr_tp_leave(tp, &t[0], dim, bias, &t[1], self.stream, work)
                })
            }

            /// See [`TensorParallel::leave_backward`].
            pub fn leave_backward(
                &self,
                grad: &CudaTensor,
                output: &CudaTensor,
                dim: Option<usize>,
            ) -> Result<$result> {
                let dim = c_dim(dim)?;
                self.issue(self.tp.views_of([grad, output]), |t, work| unsafe {
                    sys::tsr_tp_leave_backward(self.tp.inner.as_ptr(), &t[0], dim, &t[1], self.stream, work)
                })
            }

            /// See [`TensorParallel::gather`].
            pub fn gather(&self, input: &CudaTensor, output: &CudaTensor, dim: usize) -> Result<$result> {
                let dim = c_dim(Some(dim))?;
                self.issue(self.tp.views_of([input, output]), |t, work| unsafe {
                    sys::tsr_tp_gather(self.tp.inner.as_ptr(), &t[0], dim, &t[1], self.stream, work)
                })
            }

            /// See [`TensorParallel::embed`]. The call cannot see the ids: the row of one outside of the vocabulary is
            /// zeros, and once the device is done the communicator fails with `InvalidArgument`.
            pub fn embed(
                &self,
                index: usize,
                ids: &CudaTensor,
                output: &CudaTensor,
                dim: Option<usize>,
            ) -> Result<$result> {
                let dim = c_dim(dim)?;
                self.issue(self.tp.views_of([ids, output]), |t, work| unsafe {
                    sys::tsr_tp_embed(self.tp.inner.as_ptr(), index, &t[0], dim, &t[1], self.stream, work)
                })
            }

            /// See [`TensorParallel::embed_backward`]: adds to [`cuda_grad`](TensorParallel::cuda_grad).
            pub fn embed_backward(
                &self,
                index: usize,
                ids: &CudaTensor,
                grad: &CudaTensor,
                dim: Option<usize>,
            ) -> Result<$result> {
                let (dim, sum) = (c_dim(dim)?, self.tp.cuda_grad(index)?);
                self.issue(self.tp.views_of([ids, grad, &sum]), |t, work| unsafe {
                    let tp = self.tp.inner.as_ptr();
                    sys::tsr_tp_embed_backward(tp, index, &t[0], &t[1], dim, &t[2], self.stream, work)
                })
            }

            /// See [`TensorParallel::cross_entropy`]; `grad` may be `logits`. Class weights are those of
            /// [`CrossEntropy::cuda_class_weights`]. The call cannot see the targets: a wrong one counts as ignored, and
            /// once the device is done the communicator fails with `InvalidArgument`.
            pub fn cross_entropy(
                &self,
                settings: &CrossEntropy<'_>,
                logits: &CudaTensor,
                targets: &CudaTensor,
                loss: &CudaTensor,
                grad: Option<&CudaTensor>,
            ) -> Result<$result> {
                let weights = settings.cuda_weights;
                let tensors = [logits, targets, loss].into_iter().chain(weights).chain(grad);
                let vocabulary = raw::int64("the vocabulary", settings.vocabulary)?;
                settings.settings.with_raw(|options| {
                    options.data_ranks = settings.data_ranks.map_or(ptr::null_mut(), Comm::as_ptr);
                    self.issue(self.tp.views_of(tensors), |t, work| unsafe {
                        let grad_at = 3 + usize::from(weights.is_some());
                        let (tp, grad) = (self.tp.inner.as_ptr(), optional(t.get(grad_at)));
                        options.class_weights = if weights.is_some() { &t[3] } else { ptr::null() };
                        sys::tsr_tp_cross_entropy(tp, &t[0], vocabulary, &t[1], options, &t[2], grad, self.stream, work)
                    })
                })
            }
        }
    };
}

operations!(TpOnStream, ());
operations!(TpAfterStream, Work<()>);
