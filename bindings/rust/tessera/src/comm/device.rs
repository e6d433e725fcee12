//! Collectives of tensors on CUDA devices.

use std::ffi::c_void;
use std::fmt;
use std::ptr;

use tessera_sys as sys;

use super::Comm;
use crate::element::{DType, ReduceOp};
use crate::error::{check, Error, Result};
use crate::raw;
use crate::tensor::{count, raw_tensor, IntoTensor, Tensor};
use crate::work::{Views, Work};

/// A contiguous, row-major tensor in the memory of a CUDA device: where it is and what it holds. It owns nothing.
#[derive(Clone, Debug)]
pub struct CudaTensor {
    address: usize,
    dtype: DType,
    shape: Vec<i64>,
    device: i32,
}

impl CudaTensor {
    /// A tensor at `address` on device number `device`.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): the shape is too large, or the address is 0 and the
    /// tensor is not empty.
    ///
    /// # Safety
    /// The tensor's bytes are allocated on that device, and nobody frees them before every operation that was given this
    /// tensor or a clone is done on its stream, and every object made over it is dropped.
    pub unsafe fn new(address: usize, dtype: DType, shape: impl AsRef<[usize]>, device: usize) -> Result<Self> {
        let shape = shape.as_ref();
        if count(shape)? > 0 && address == 0 {
            return Err(Error::argument(format!("a tensor of shape {shape:?} at address 0")));
        }
        let shape = shape.iter().map(|&size| raw::int64("a size", size)).collect::<Result<_>>()?;
        Ok(CudaTensor { address, dtype, shape, device: raw::int32("the device", device)? })
    }

    /// The address of the first element.
    pub fn address(&self) -> usize {
        self.address
    }

    /// The C view of it, for a call.
    pub(crate) fn with_raw<R>(&self, call: impl FnOnce(&sys::tsr_tensor) -> R) -> R {
        let mut tensor = raw_tensor(self.address as *mut c_void, &self.shape, self.dtype);
        tensor.device_type = sys::TSR_DEVICE_CUDA;
        tensor.device_index = self.device;
        call(&tensor)
    }

    pub(crate) fn into_views(self, views: Views) -> Views {
        let mut tensor = raw_tensor(self.address as *mut c_void, &[], self.dtype);
        tensor.device_type = sys::TSR_DEVICE_CUDA;
        tensor.device_index = self.device;
        views.with_shape(tensor, self.shape)
    }
}

impl IntoTensor for CudaTensor {
    fn into_tensor(self) -> Result<Tensor> {
        // SAFETY: a contiguous tensor, whose memory its maker keeps as long as anything is given the tensor.
        self.with_raw(|raw| unsafe { Tensor::borrowed(raw) })
    }
}

impl Tensor {
    /// Where the memory is, if that is a device; `None` on the CPU.
    pub fn cuda(&self) -> Option<CudaTensor> {
        let (address, shape, device) = self.on_device()?;
        Some(CudaTensor { address, dtype: self.dtype(), shape, device })
    }
}

/// Of a model's tensor `what`, which a program gets by `instead`.
pub(crate) fn on_cpu(what: &dyn fmt::Display, instead: &str) -> Error {
    Error::argument(format!("{what} is on the CPU: use {instead}"))
}

/// The collectives of a [`Comm`] on a CUDA stream; see [`Comm::on_stream`].
#[derive(Clone, Copy, Debug)]
pub struct OnStream<'a> {
    comm: &'a Comm,
    stream: *mut c_void,
}

/// The asynchronous collectives of a [`Comm`] after a CUDA stream; see [`Comm::after_stream`].
#[derive(Clone, Copy, Debug)]
pub struct AfterStream<'a> {
    comm: &'a Comm,
    stream: *mut c_void,
}

/// # Tensors on CUDA devices
/// They need the backend `"cpu:auto,cuda:nccl"`. Messages between two ranks match in their order, whatever their tags.
impl Comm {
    /// Collectives in the order of a stream: each returns once it is on the stream, and what the stream gets later sees
    /// the result.
    ///
    /// # Safety
    /// `stream` is a CUDA stream of this rank's device (`cudaStream_t`) as long as what is returned is used, or null for
    /// the default stream.
    pub unsafe fn on_stream(&self, stream: *mut c_void) -> OnStream<'_> {
        OnStream { comm: self, stream }
    }

    /// Asynchronous collectives, after what a stream has now: each returns a [`Work`] that is done when the device is.
    /// [`Work::order`] makes a stream wait for it.
    ///
    /// # Safety
    /// As for [`Comm::on_stream`].
    pub unsafe fn after_stream(&self, stream: *mut c_void) -> AfterStream<'_> {
        AfterStream { comm: self, stream }
    }
}

impl OnStream<'_> {
    fn issue(
        &self,
        views: Views,
        call: impl FnOnce(&[sys::tsr_tensor], *mut *mut sys::tsr_work) -> sys::tsr_status,
    ) -> Result<()> {
        check(call(views.tensors(), ptr::null_mut()))
    }
}

impl AfterStream<'_> {
    fn issue(
        &self,
        views: Views,
        call: impl FnOnce(&[sys::tsr_tensor], *mut *mut sys::tsr_work) -> sys::tsr_status,
    ) -> Result<Work<()>> {
        // SAFETY: the call starts one operation on these views; whoever made the tensors keeps their memory.
        unsafe { Work::start((), views, call) }
    }
}

fn views_of<'a>(tensors: impl IntoIterator<Item = &'a CudaTensor>) -> Views {
    tensors.into_iter().fold(Views::default(), |views, tensor| tensor.clone().into_views(views))
}

fn in_pairs(inputs: &[CudaTensor], outputs: &[CudaTensor]) -> Result<()> {
    if inputs.len() == outputs.len() {
        return Ok(());
    }
    Err(Error::argument(format!("{} inputs and {} outputs; pass them in pairs", inputs.len(), outputs.len())))
}

macro_rules! collectives {
    ($name:ident, $result:ty) => {
        /// Errors: see [Collectives](Comm#collectives); [`Code::InvalidArgument`](crate::Code::InvalidArgument) also for a
        /// tensor or a stream of another device, [`Code::Cuda`](crate::Code::Cuda), [`Code::Nccl`](crate::Code::Nccl).
        #[allow(clippy::missing_errors_doc)]
        impl $name<'_> {
            /// Reduces tensors over the ranks in place; the same number on every rank.
            pub fn all_reduce(&self, tensors: &[CudaTensor], op: ReduceOp) -> Result<$result> {
                // SAFETY: the views live as long as the operation; so below.
                self.issue(views_of(tensors), |t, work| unsafe {
                    sys::tsr_comm_all_reduce(self.comm.as_ptr(), t.as_ptr(), t.len(), op.as_raw(), self.stream, work)
                })
            }

            /// Reduces `input`; rank r's `output` gets the r-th of world-size equal parts of the result.
            pub fn reduce_scatter(&self, input: &CudaTensor, output: &CudaTensor, op: ReduceOp) -> Result<$result> {
                self.issue(views_of([input, output]), |t, work| unsafe {
                    sys::tsr_comm_reduce_scatter(self.comm.as_ptr(), &t[0], &t[1], op.as_raw(), self.stream, work)
                })
            }

            /// Concatenates all ranks' `input` in rank order; `output` is world-size times as long.
            pub fn all_gather(&self, input: &CudaTensor, output: &CudaTensor) -> Result<$result> {
                self.issue(views_of([input, output]), |t, work| unsafe {
                    sys::tsr_comm_all_gather(self.comm.as_ptr(), &t[0], &t[1], self.stream, work)
                })
            }

            /// Several `reduce_scatter` in one operation, of `inputs[i]` into `outputs[i]`.
            pub fn reduce_scatter_coalesced(
                &self,
                inputs: &[CudaTensor],
                outputs: &[CudaTensor],
                op: ReduceOp,
            ) -> Result<$result> {
                in_pairs(inputs, outputs)?;
                let (n, op) = (inputs.len(), op.as_raw());
                self.issue(views_of(inputs.iter().chain(outputs)), |t, work| unsafe {
                    let (i, o) = t.split_at(n);
                    let comm = self.comm.as_ptr();
                    sys::tsr_comm_reduce_scatter_coalesced(comm, i.as_ptr(), o.as_ptr(), n, op, self.stream, work)
                })
            }

            /// Several `all_gather` in one operation, of `inputs[i]` into `outputs[i]`.
            pub fn all_gather_coalesced(&self, inputs: &[CudaTensor], outputs: &[CudaTensor]) -> Result<$result> {
                in_pairs(inputs, outputs)?;
                let n = inputs.len();
                self.issue(views_of(inputs.iter().chain(outputs)), |t, work| unsafe {
                    let (i, o) = t.split_at(n);
                    let comm = self.comm.as_ptr();
                    sys::tsr_comm_all_gather_coalesced(comm, i.as_ptr(), o.as_ptr(), n, self.stream, work)
                })
            }

            /// Gathers inputs of different lengths: `outputs[r]` receives rank r's.
            pub fn all_gather_v(&self, input: &CudaTensor, outputs: &[CudaTensor]) -> Result<$result> {
                let ranks = self.comm.world_size()?;
                if outputs.len() != ranks {
                    let got = outputs.len();
                    return Err(Error::argument(format!("{got} outputs for {ranks} ranks; pass one per rank")));
                }
                self.issue(views_of(std::iter::once(input).chain(outputs)), |t, work| unsafe {
                    sys::tsr_comm_all_gather_v(self.comm.as_ptr(), &t[0], t[1..].as_ptr(), self.stream, work)
                })
            }

            /// Gives every rank the root's tensors, in place.
            pub fn broadcast(&self, tensors: &[CudaTensor], root: usize) -> Result<$result> {
                let root = raw::int32("the root", root)?;
                self.issue(views_of(tensors), |t, work| unsafe {
                    sys::tsr_comm_broadcast(self.comm.as_ptr(), t.as_ptr(), t.len(), root, self.stream, work)
                })
            }

            /// Reduces `input`; the root gets the result, in `output`, which may be `input`.
            pub fn reduce(
                &self,
                input: &CudaTensor,
                output: Option<&CudaTensor>,
                op: ReduceOp,
                root: usize,
            ) -> Result<$result> {
                let (root, op) = (raw::int32("the root", root)?, op.as_raw());
                self.issue(views_of(std::iter::once(input).chain(output)), |t, work| unsafe {
                    let output = t.get(1).map_or(ptr::null(), ptr::from_ref);
                    sys::tsr_comm_reduce(self.comm.as_ptr(), &t[0], output, op, root, self.stream, work)
                })
            }

            /// Concatenates all ranks' `input` on the root, in `output`.
            pub fn gather(&self, input: &CudaTensor, output: Option<&CudaTensor>, root: usize) -> Result<$result> {
                let root = raw::int32("the root", root)?;
                self.issue(views_of(std::iter::once(input).chain(output)), |t, work| unsafe {
                    let output = t.get(1).map_or(ptr::null(), ptr::from_ref);
                    sys::tsr_comm_gather(self.comm.as_ptr(), &t[0], output, root, self.stream, work)
                })
            }

            /// Sends rank r the r-th of world-size equal parts of the root's `input`.
            pub fn scatter(&self, input: Option<&CudaTensor>, output: &CudaTensor, root: usize) -> Result<$result> {
                let root = raw::int32("the root", root)?;
                self.issue(views_of(std::iter::once(output).chain(input)), |t, work| unsafe {
                    let input = t.get(1).map_or(ptr::null(), ptr::from_ref);
                    sys::tsr_comm_scatter(self.comm.as_ptr(), input, &t[0], root, self.stream, work)
                })
            }

            /// Sends the r-th of world-size equal parts of `input` to rank r; parts arrive in rank order.
            pub fn all_to_all(&self, input: &CudaTensor, output: &CudaTensor) -> Result<$result> {
                self.issue(views_of([input, output]), |t, work| unsafe {
                    sys::tsr_comm_all_to_all(self.comm.as_ptr(), &t[0], &t[1], self.stream, work)
                })
            }

            /// Sends a tensor to rank `peer`.
            pub fn send(&self, tensor: &CudaTensor, peer: usize) -> Result<$result> {
                let peer = raw::int32("the peer", peer)?;
                self.issue(views_of([tensor]), |t, work| unsafe {
                    sys::tsr_comm_send(self.comm.as_ptr(), t.as_ptr(), peer, 0, self.stream, work)
                })
            }

            /// Receives a tensor from rank `peer`.
            pub fn recv(&self, tensor: &CudaTensor, peer: usize) -> Result<$result> {
                let peer = raw::int32("the peer", peer)?;
                self.issue(views_of([tensor]), |t, work| unsafe {
                    sys::tsr_comm_recv(self.comm.as_ptr(), t.as_ptr(), peer, 0, self.stream, work)
                })
            }
        }
    };
}

collectives!(OnStream, ());
collectives!(AfterStream, Work<()>);
