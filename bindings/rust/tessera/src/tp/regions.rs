//! Activations into, inside of and out of the regions in which each rank computes with its slices.

use std::ffi::{c_char, c_void};
use std::panic;
use std::ptr;
use std::sync::Arc;

use tessera_sys as sys;

use super::TensorParallel;
use crate::buffer::OwnedSlice;
use crate::callback::{answer_and_keep, CallbackResult, Failure};
use crate::element::Element;
use crate::error::{check, Error, Result};
use crate::raw;
use crate::tensor::{count, flat_shape, raw_tensor, slice, slice_mut};
use crate::work::{Views, Work};

/// A C function between two activations, such as `tsr_tp_enter`.
type Move = unsafe fn(
    *mut sys::tsr_tp,
    *const sys::tsr_tensor,
    i32,
    *const sys::tsr_tensor,
    *mut c_void,
    *mut *mut sys::tsr_work,
) -> sys::tsr_status;

/// What an operation makes of its input along `dim`.
#[derive(Clone, Copy)]
enum Makes {
    Whole,
    Part,
}

/// What computes the parts of an activation, and how it failed.
pub(super) struct PartCall<F> {
    pub(super) compute: F,
    pub(super) failure: Option<Failure>,
}

unsafe extern "C" fn on_part<T: Element, F: FnMut(usize, *mut T, usize) -> CallbackResult<()>>(
    begin: i64,
    part: *const sys::tsr_tensor,
    message: *mut c_char,
    call: *mut c_void,
) -> i32 {
    // SAFETY: `in_parts` passes this object, which nothing else uses meanwhile; the library passes a tensor.
    let (call, part) = unsafe { (&mut *call.cast::<PartCall<F>>(), &*part) };
    // SAFETY: the library's buffer for messages, and a tensor's shape.
    unsafe {
        let sizes = slice(part.shape, usize::try_from(part.ndim).unwrap_or(0));
        let len = sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).product();
        let compute = &mut call.compute;
        answer_and_keep(message, &mut call.failure, || {
            compute(usize::try_from(begin).unwrap_or(0), part.data.cast(), len)
        })
    }
}

fn in_parts<T: Element, F: FnMut(usize, *mut T, usize) -> CallbackResult<()>>(
    compute: F,
    run: impl FnOnce(sys::tsr_tp_part_fn, *mut c_void) -> sys::tsr_status,
) -> Result<()> {
    in_calls(compute, |call| run(Some(on_part::<T, F>), call))
}

/// Runs a C function that calls back with the `PartCall` of `compute`.
pub(super) fn in_calls<F>(compute: F, run: impl FnOnce(*mut c_void) -> sys::tsr_status) -> Result<()> {
    let mut call = PartCall { compute, failure: None };
    let result = check(run(ptr::from_mut(&mut call).cast()));
    match call.failure {
        Some(Failure::Panic(payload)) => panic::resume_unwind(payload),
        Some(Failure::Error(own)) => result.map_err(|error| error.caused_by(own)),
        None => result,
    }
}

/// # Activations
/// `shape` is always that of the complete activation, of at most 8 dimensions; `dim` is the dimension along which it is cut
/// over the ranks outside of the region. With `None`, every rank has all of it there. It is cut like `torch.chunk`, along
/// any dimension, and [`part`](Self::part) gives this rank's indices. Elements are in row-major order.
///
/// Each `_backward` is the adjoint of the other: it takes the gradient of what the other returned, with the same `shape`
/// and `dim`. All are collective, except [`split`](Self::split); each returns when the operation is done on this rank.
/// Errors common to all: `InvalidArgument`: a length does not fit `shape`, or there is no dimension `dim`; `InvalidState`:
/// another call of the model is running; `Mismatch`: the ranks call different operations; `Unsupported`: a sum of a dtype
/// that cannot be reduced; `Timeout`, `Aborted`, `PeerLost`, `NoMemory`, `Interrupted`.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, Comm, Mesh, Style, TensorParallel};
/// let comm = Comm::from_env()?;
/// let mesh = Mesh::new(&comm, &[("tp", comm.world_size()?)])?;
/// let tp = TensorParallel::builder(&mesh, params!["norm.weight" => (vec![1.0f32; 2], [2])])
///     .plan([("norm", Style::Sequence)])
///     .sequence_parallel(true)
///     .build()?;
/// let shape = [6, 2]; // 6 places of a sequence, of which each rank has some outside of the region
/// let mine = vec![1.0f32; tp.part(6).len() * 2];
/// let mut whole = vec![0.0f32; 12];
/// tp.enter(&mine, &mut whole, &shape, Some(0))?;
/// assert_eq!(whole, [1.0; 12]);
/// let mut sum = vec![0.0f32; mine.len()];
/// tp.leave(&whole, &mut sum, &shape, Some(0), Some(&tp.slice(0)?))?; // a bias of ones
/// assert!(sum.iter().all(|&y| y == comm.world_size().unwrap() as f32 + 1.0));
/// # Ok(()) }
/// ```
impl TensorParallel<'_> {
    /// Enters a region, in which every rank has all of an activation: forward. With `dim` it gathers the ranks' parts
    /// `input` into `output`; with `None` it copies, and a program that needs no copy need not call it.
    ///
    /// # Errors
    /// See [Activations](#activations).
    pub fn enter<T: Element>(&self, input: &[T], output: &mut [T], shape: &[usize], dim: Option<usize>) -> Result<()> {
        self.moved(sys::tsr_tp_enter, Makes::Whole, input, output, shape, dim)
    }

    /// The adjoint of [`enter`](Self::enter): `output` is the sum over the ranks of `grad`, each rank's gradient of the
    /// complete activation; with `dim` it is this rank's part of the sum.
    ///
    /// # Errors
    /// See [Activations](#activations).
    pub fn enter_backward<T: Element>(
        &self,
        grad: &[T],
        output: &mut [T],
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<()> {
        self.moved(sys::tsr_tp_enter_backward, Makes::Part, grad, output, shape, dim)
    }

    /// [`enter_backward`](Self::enter_backward) without `dim`, in place: sums `grad` over the ranks.
    ///
    /// # Errors
    /// See [Activations](#activations).
    pub fn enter_backward_in_place<T: Element>(&self, grad: &mut [T]) -> Result<()> {
        let shape = flat_shape(grad.len());
        let tensor = raw_tensor(grad.as_mut_ptr().cast(), &shape, T::DTYPE);
        // SAFETY: the handle is alive and used by this thread alone; the slice is borrowed for the call, which returns when it
        // is done with it.
        check(unsafe {
            let (tp, stream, work) = (self.inner.as_ptr(), ptr::null_mut(), ptr::null_mut());
            sys::tsr_tp_enter_backward(tp, &tensor, -1, &tensor, stream, work)
        })
    }

    /// Leaves a region, in which each rank computed a summand `input` of an activation: forward. `output` is the sum over
    /// the ranks, with `dim` this rank's part of it; then the bias is added, once. It has as many elements as the last
    /// dimension of `output`.
    ///
    /// # Errors
    /// See [Activations](#activations).
    pub fn leave<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        shape: &[usize],
        dim: Option<usize>,
        bias: Option<&[T]>,
    ) -> Result<()> {
        let whole = self.sizes("input", input.len(), shape, None)?;
        let part = self.sizes("output", output.len(), shape, dim)?;
        let input = raw_tensor(input.as_ptr().cast_mut().cast(), &whole, T::DTYPE);
        let output = raw_tensor(output.as_mut_ptr().cast(), &part, T::DTYPE);
        let (tp, dim) = (self.inner.as_ptr(), c_dim(dim)?);
        // SAFETY: the handle is alive and used by this thread alone; all memory is borrowed for the call, which returns when it
        // is done with it.
        adding(bias, |bias| unsafe {
            sys::tsr_tp_leave(tp, &input, dim, bias, &output, ptr::null_mut(), ptr::null_mut())
        })
    }

    /// [`enter`](Self::enter) with a dimension, overlapped: `compute` gets the part of each rank in order, except empty
    /// ones, and its first index along `dim`, while the next ones are on their way. It must not use this model. If it
    /// fails, `output` is complete all the same, and no other rank has failed.
    ///
    /// # Errors
    /// See [Activations](#activations); and that of `compute`, with its code.
    pub fn enter_parts<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        shape: &[usize],
        dim: usize,
        mut compute: impl FnMut(usize, &[T]) -> CallbackResult<()>,
    ) -> Result<()> {
        let part = self.sizes("input", input.len(), shape, Some(dim))?;
        let whole = self.sizes("output", output.len(), shape, None)?;
        let input = raw_tensor(input.as_ptr().cast_mut().cast(), &part, T::DTYPE);
        let output = raw_tensor(output.as_mut_ptr().cast(), &whole, T::DTYPE);
        let (tp, dim) = (self.inner.as_ptr(), c_dim(Some(dim))?);
        in_parts(
            // SAFETY: the library passes elements of the input's dtype, which nothing writes before it returns.
            |begin, data: *mut T, len| compute(begin, unsafe { slice(data, len) }),
            // SAFETY: the handle is alive and used by this thread alone; all memory is borrowed for the call.
            |on_part, call| unsafe {
                sys::tsr_tp_enter_parts(tp, &input, dim, &output, ptr::null_mut(), on_part, call)
            },
        )
    }

    /// [`leave`](Self::leave) with a dimension, overlapped: `compute` writes this rank's summand of the part of each rank
    /// in order, except empty ones, from its first index along `dim` on, while the one before is being summed. It must not
    /// use this model. If it fails, the communicator ends on every rank.
    ///
    /// # Errors
    /// See [Activations](#activations); and that of `compute`, with its code.
    pub fn leave_parts<T: Element>(
        &self,
        output: &mut [T],
        shape: &[usize],
        dim: usize,
        bias: Option<&[T]>,
        mut compute: impl FnMut(usize, &mut [T]) -> CallbackResult<()>,
    ) -> Result<()> {
        let part = self.sizes("output", output.len(), shape, Some(dim))?;
        let size = i64::try_from(shape[dim]).map_err(|_| Error::argument("the size does not fit into 64 bits"))?;
        let output = raw_tensor(output.as_mut_ptr().cast(), &part, T::DTYPE);
        let (tp, dim) = (self.inner.as_ptr(), c_dim(Some(dim))?);
        let mut result = Ok(());
        adding(bias, |bias| {
            result = in_parts(
                // SAFETY: the library passes elements of the output's dtype, which are for this call alone.
                |begin, data: *mut T, len| compute(begin, unsafe { slice_mut(data, len) }),
                // SAFETY: as in `enter_parts`.
                |on_part, call| unsafe {
                    sys::tsr_tp_leave_parts(tp, size, dim, bias, &output, ptr::null_mut(), on_part, call)
                },
            );
            sys::TSR_OK
        })?;
        result
    }

    /// [`leave`](Self::leave) without `dim`, in place.
    ///
    /// # Errors
    /// See [Activations](#activations).
    pub fn leave_in_place<T: Element>(&self, data: &mut [T], shape: &[usize], bias: Option<&[T]>) -> Result<()> {
        let sizes = self.sizes("data", data.len(), shape, None)?;
        let (tp, tensor) = (self.inner.as_ptr(), raw_tensor(data.as_mut_ptr().cast(), &sizes, T::DTYPE));
        // SAFETY: as in `leave`.
        adding(bias, |bias| unsafe {
            sys::tsr_tp_leave(tp, &tensor, -1, bias, &tensor, ptr::null_mut(), ptr::null_mut())
        })
    }

    /// The adjoint of [`leave`](Self::leave): `output` is the gradient of every rank's summand, which with `dim` is
    /// gathered from the ranks' parts `grad`; with `None` it copies, and a program that needs no copy need not call it.
    ///
    /// # Errors
    /// See [Activations](#activations).
    pub fn leave_backward<T: Element>(
        &self,
        grad: &[T],
        output: &mut [T],
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<()> {
        self.moved(sys::tsr_tp_leave_backward, Makes::Whole, grad, output, shape, dim)
    }

    /// Gathers an activation that is cut along `dim` inside of a region, such as the outputs of a
    /// [`Style::Column`](crate::Style::Column) weight, from the ranks' parts `input`. Its adjoint is
    /// [`split`](Self::split) if every rank then computes the same, otherwise [`enter_backward`](Self::enter_backward).
    ///
    /// # Errors
    /// See [Activations](#activations).
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], shape: &[usize], dim: usize) -> Result<()> {
        self.moved(sys::tsr_tp_gather, Makes::Whole, input, output, shape, Some(dim))
    }

    /// Takes this rank's part along `dim` of an activation that every rank has, such as the input of a
    /// [`Style::Row`](crate::Style::Row) weight. Not collective. Its adjoint is [`gather`](Self::gather).
    ///
    /// # Errors
    /// `InvalidArgument`: a length does not fit `shape`, or there is no dimension `dim`.
    pub fn split<T: Element>(&self, input: &[T], output: &mut [T], shape: &[usize], dim: usize) -> Result<()> {
        let whole = self.sizes("input", input.len(), shape, None)?;
        let part = self.sizes("output", output.len(), shape, Some(dim))?;
        let input = raw_tensor(input.as_ptr().cast_mut().cast(), &whole, T::DTYPE);
        let output = raw_tensor(output.as_mut_ptr().cast(), &part, T::DTYPE);
        let dim = c_dim(Some(dim))?;
        // SAFETY: the handle is alive; the slices are borrowed for the call.
        check(unsafe { sys::tsr_tp_split(self.inner.as_ptr(), &input, dim, &output, ptr::null_mut()) })
    }

    fn moved<T: Element>(
        &self,
        call: Move,
        makes: Makes,
        input: &[T],
        output: &mut [T],
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<()> {
        let (from, to) = self.ends(makes, input.len(), output.len(), shape, dim)?;
        let input = raw_tensor(input.as_ptr().cast_mut().cast(), &from, T::DTYPE);
        let output = raw_tensor(output.as_mut_ptr().cast(), &to, T::DTYPE);
        let dim = c_dim(dim)?;
        // SAFETY: the handle is alive and used by this thread alone; the slices are borrowed for the call, which returns when
        // it is done with them.
        check(unsafe { call(self.inner.as_ptr(), &input, dim, &output, ptr::null_mut(), ptr::null_mut()) })
    }

    /// C's shapes of an operation's input and output.
    fn ends(
        &self,
        makes: Makes,
        input: usize,
        output: usize,
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<(Vec<i64>, Vec<i64>)> {
        let (from, to) = match makes {
            Makes::Whole => (dim, None),
            Makes::Part => (None, dim),
        };
        Ok((self.sizes("input", input, shape, from)?, self.sizes("output", output, shape, to)?))
    }

    /// C's shape of a slice of `len` elements, which has this rank's part along `dim` of an activation, or all of it.
    pub(super) fn sizes(&self, what: &str, len: usize, shape: &[usize], dim: Option<usize>) -> Result<Vec<i64>> {
        let mut sizes = shape.to_vec();
        if let Some(dim) = dim {
            let Some(size) = sizes.get_mut(dim) else {
                return Err(Error::argument(format!(
                    "dim is {dim}; an activation of shape {shape:?} has {} dimensions, counted from 0",
                    shape.len()
                )));
            };
            *size = self.part(*size).len();
        }
        let expected = count(&sizes)?;
        if len != expected {
            let of = dim.map_or(String::new(), |dim| format!(", this rank's part of {shape:?} along dimension {dim}"));
            return Err(Error::argument(format!("{what} has {len} elements; {sizes:?}{of} has {expected}")));
        }
        sizes.into_iter().map(|size| raw::int64("a size", size)).collect()
    }
}

/// # Activations in the background
/// Each immediately returns a [`Work`] that owns the buffers until the operation is done, like the
/// [asynchronous operations](crate::Comm#asynchronous-operations) of a [`Comm`](crate::Comm). Operations run in the order
/// in which they were issued, and keep the model's memory for as long as they need it. Arguments and errors are those of
/// [Activations](#activations); later errors come from the work.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// # use tessera::{params, Comm, Mesh, TensorParallel};
/// # let comm = Comm::from_env()?;
/// # let mesh = Mesh::new(&comm, &[("tp", comm.world_size()?)])?;
/// # let tp = TensorParallel::builder(&mesh, params!["w" => (vec![1.0f32], [1])]).build()?;
/// let dx = tp.enter_backward_in_place_async(vec![1.0f32; 4])?; // meanwhile: the gradient of the weight
/// let dx = dx.wait()?;
/// assert_eq!(dx, [comm.world_size()? as f32; 4]);
/// # Ok(()) }
/// ```
impl TensorParallel<'_> {
    /// [`enter`](Self::enter), in the background; the work returns `(input, output)`.
    ///
    /// # Errors
    /// See [Activations in the background](#activations-in-the-background).
    pub fn enter_async<A, B>(&self, input: A, output: B, shape: &[usize], dim: Option<usize>) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.moving(sys::tsr_tp_enter, Makes::Whole, input, output, shape, dim)
    }

    /// [`enter_backward`](Self::enter_backward), in the background; the work returns `(grad, output)`.
    ///
    /// # Errors
    /// See [Activations in the background](#activations-in-the-background).
    pub fn enter_backward_async<A, B>(
        &self,
        grad: A,
        output: B,
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.moving(sys::tsr_tp_enter_backward, Makes::Part, grad, output, shape, dim)
    }

    /// [`enter_backward_in_place`](Self::enter_backward_in_place), in the background.
    ///
    /// # Errors
    /// See [Activations in the background](#activations-in-the-background).
    pub fn enter_backward_in_place_async<B: OwnedSlice>(&self, mut grad: B) -> Result<Work<B>> {
        let views = self.views().of(grad.as_mut_ptr(), grad.len());
        // SAFETY: the work keeps data, views and the model; the C function starts one operation on them.
        unsafe {
            Work::start(grad, views, |tensors, work| {
                let (tp, grad) = (self.inner.as_ptr(), &tensors[0]);
                sys::tsr_tp_enter_backward(tp, grad, -1, grad, ptr::null_mut(), work)
            })
        }
    }

    /// [`leave`](Self::leave), in the background; the work returns `(input, output)`. The bias is copied.
    ///
    /// # Errors
    /// See [Activations in the background](#activations-in-the-background).
    pub fn leave_async<A, B>(
        &self,
        mut input: A,
        mut output: B,
        shape: &[usize],
        dim: Option<usize>,
        bias: Option<&[A::Element]>,
    ) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        let (from, to) = self.ends(Makes::Part, input.len(), output.len(), shape, dim)?;
        let views = self.views().shaped(input.as_mut_ptr(), from).shaped(output.as_mut_ptr(), to);
        let (views, dim) = (with_bias(views, bias), c_dim(dim)?);
        // SAFETY: the work keeps data, views, bias and the model; the C function starts one operation on them.
        unsafe {
            Work::start((input, output), views, |tensors, work| {
                let (tp, bias, stream) = (self.inner.as_ptr(), optional(tensors.get(2)), ptr::null_mut());
                sys::tsr_tp_leave(tp, &tensors[0], dim, bias, &tensors[1], stream, work)
            })
        }
    }

    /// [`leave_in_place`](Self::leave_in_place), in the background. The bias is copied.
    ///
    /// # Errors
    /// See [Activations in the background](#activations-in-the-background).
    pub fn leave_in_place_async<B: OwnedSlice>(
        &self,
        mut data: B,
        shape: &[usize],
        bias: Option<&[B::Element]>,
    ) -> Result<Work<B>> {
        let sizes = self.sizes("data", data.len(), shape, None)?;
        let views = with_bias(self.views().shaped(data.as_mut_ptr(), sizes), bias);
        // SAFETY: the work keeps data, views, bias and the model; the C function starts one operation on them.
        unsafe {
            Work::start(data, views, |tensors, work| {
                let (tp, data, stream) = (self.inner.as_ptr(), &tensors[0], ptr::null_mut());
                sys::tsr_tp_leave(tp, data, -1, optional(tensors.get(1)), data, stream, work)
            })
        }
    }

    /// [`leave_backward`](Self::leave_backward), in the background; the work returns `(grad, output)`.
    ///
    /// # Errors
    /// See [Activations in the background](#activations-in-the-background).
    pub fn leave_backward_async<A, B>(
        &self,
        grad: A,
        output: B,
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.moving(sys::tsr_tp_leave_backward, Makes::Whole, grad, output, shape, dim)
    }

    /// [`gather`](Self::gather), in the background; the work returns `(input, output)`.
    ///
    /// # Errors
    /// See [Activations in the background](#activations-in-the-background).
    pub fn gather_async<A, B>(&self, input: A, output: B, shape: &[usize], dim: usize) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.moving(sys::tsr_tp_gather, Makes::Whole, input, output, shape, Some(dim))
    }

    fn moving<A, B>(
        &self,
        call: Move,
        makes: Makes,
        mut input: A,
        mut output: B,
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        let (from, to) = self.ends(makes, input.len(), output.len(), shape, dim)?;
        let views = self.views().shaped(input.as_mut_ptr(), from).shaped(output.as_mut_ptr(), to);
        let dim = c_dim(dim)?;
        // SAFETY: the work keeps data, views and the model; the C function starts one operation on them.
        unsafe {
            Work::start((input, output), views, |tensors, work| {
                call(self.inner.as_ptr(), &tensors[0], dim, &tensors[1], ptr::null_mut(), work)
            })
        }
    }

    /// No views yet; they keep the model.
    fn views(&self) -> Views {
        Views::default().keep(Arc::clone(&self.inner.handle))
    }
}

/// Runs a call of C with the bias.
fn adding<T: Element>(bias: Option<&[T]>, call: impl FnOnce(*const sys::tsr_tensor) -> sys::tsr_status) -> Result<()> {
    let shape = flat_shape(bias.map_or(0, <[T]>::len));
    let bias = bias.map(|bias| raw_tensor(bias.as_ptr().cast_mut().cast(), &shape, T::DTYPE));
    check(call(optional(bias.as_ref())))
}

/// Adds a copy of the bias.
fn with_bias<T: Element>(views: Views, bias: Option<&[T]>) -> Views {
    let Some(bias) = bias else { return views };
    let mut copy = bias.to_vec();
    views.of(copy.as_mut_ptr(), copy.len()).keep(copy) // whose elements stay where they are
}

pub(super) fn optional(tensor: Option<&sys::tsr_tensor>) -> *const sys::tsr_tensor {
    tensor.map_or(ptr::null(), ptr::from_ref)
}

/// C's dimension, where -1 is none.
pub(super) fn c_dim(dim: Option<usize>) -> Result<i32> {
    dim.map_or(Ok(-1), |dim| raw::int32("dim", dim))
}
