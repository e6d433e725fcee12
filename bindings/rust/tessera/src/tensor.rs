//! Tensors: memory that Rust and the library share, and the views that prevent conflicting access.
//!
//! The library writes to memory that it got earlier: an optimizer's step changes parameters, a load fills a state. A
//! `&[f32]` into such memory must not be alive while that happens, and lifetimes cannot express this if several objects
//! share it. Therefore access goes through [`View`] and [`ViewMut`], counted at run time like `RefCell`'s borrows: a
//! call that would write to memory with a live view fails with [`Code::InvalidState`](crate::Code::InvalidState).
//! Conversely, while such a call runs, its callbacks (an interrupt check, the log) cannot get a view of this memory.

use std::alloc::{alloc_zeroed, Layout};
use std::any::Any;
use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use tessera_sys as sys;

use crate::element::{DType, Element};
use crate::error::{Code, Error, Result};
use crate::raw;

/// A contiguous, row-major CPU tensor that owns its memory. A clone is another handle of the same memory.
///
/// One made of a [`CudaTensor`](crate::CudaTensor) has memory of a device, which it does not own and which cannot be viewed.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::Tensor;
/// let tensor = Tensor::new(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?;
/// tensor.view_mut::<f32>()?[5] = 7.0;
/// assert_eq!(tensor.view::<f32>()?[..], [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Tensor(Rc<Memory>);

struct Memory {
    data: *mut c_void,
    len: usize,
    dtype: DType,
    shape: Box<[i64]>,
    access: Access,
    /// The CUDA device that `data` is on; `None`: the CPU.
    device: Option<i32>,
    /// Other ranks see the memory too: only the library writes it, and nobody may keep it.
    shared: bool,
    /// What `data` points into; `None` where a DDP object, which outlives this, owns the memory.
    _owner: Option<Box<dyn Any>>,
}

/// Who currently uses a tensor's memory.
struct Access(Cell<isize>);

impl Access {
    const WRITER: isize = -1;
    const LIBRARY: isize = -2;
    const DEFERRED: isize = -3;

    fn free() -> Self {
        Access(Cell::new(0))
    }

    fn refusal(&self) -> Error {
        Error::state(match self.0.get() {
            Self::LIBRARY => "the tensor is being loaded, updated, or reduced over the ranks (until wait())",
            Self::DEFERRED => "the tensor is deferred: it describes a model's parameter whose values come later",
            Self::WRITER => "a mutable view of the tensor is alive; drop it first",
            _ => "a view of the tensor is alive; drop it first",
        })
    }

    fn check_readable(&self) -> Result<()> {
        if self.0.get() >= 0 {
            Ok(())
        } else {
            Err(self.refusal())
        }
    }

    fn check_writable(&self) -> Result<()> {
        if self.0.get() == 0 {
            Ok(())
        } else {
            Err(self.refusal())
        }
    }
}

impl Tensor {
    /// A tensor of `data`, whose number of elements must be the product of `shape`.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): the lengths differ.
    pub fn new<T: Element>(mut data: Vec<T>, shape: impl AsRef<[usize]>) -> Result<Self> {
        let shape = shape.as_ref();
        let elements = count(shape)?;
        if elements != data.len() {
            return Err(Error::argument(format!(
                "a tensor of shape {shape:?} has {elements} elements, got {} values",
                data.len()
            )));
        }
        let shape = shape.iter().map(|&size| raw::int64("a size", size)).collect::<Result<_>>()?;
        Ok(Tensor(Rc::new(Memory {
            data: data.as_mut_ptr().cast(),
            len: data.len(),
            dtype: T::DTYPE,
            shape,
            access: Access::free(),
            device: None,
            shared: false,
            _owner: Some(Box::new(data)), // moving a Vec leaves its elements where they are
        })))
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Code::NoMemory`](crate::Code::NoMemory); [`Code::InvalidArgument`](crate::Code::InvalidArgument): the shape is
    /// too large.
    pub fn zeros(dtype: DType, shape: impl AsRef<[usize]>) -> Result<Self> {
        let shape = shape.as_ref();
        let len = count(shape)?;
        let bytes = len.checked_mul(dtype.size()).ok_or_else(|| too_large(shape))?;
        let mut words = zeroed_words(bytes.div_ceil(8)).ok_or_else(|| {
            Error::new(Code::NoMemory, format!("cannot allocate {bytes} bytes for a tensor of shape {shape:?}"))
        })?;
        Ok(Tensor(Rc::new(Memory {
            data: words.as_mut_ptr().cast(),
            len,
            dtype,
            shape: shape.iter().map(|&size| raw::int64("a size", size)).collect::<Result<_>>()?,
            access: Access::free(),
            device: None,
            shared: false,
            _owner: Some(Box::new(words)),
        })))
    }

    /// A tensor without memory, for a parameter of an [`Fsdp`](crate::Fsdp) or
    /// [`TensorParallel`](crate::TensorParallel) whose values are written into its shards or slices later: no rank needs
    /// memory for all of it. It cannot be viewed, and can only be used there.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): the shape is too large.
    pub fn deferred(dtype: DType, shape: impl AsRef<[usize]>) -> Result<Self> {
        Self::without_memory(dtype, shape.as_ref(), None)
    }

    /// The same for a model whose parameters are on CUDA device number `device`.
    ///
    /// # Errors
    /// As [`Tensor::deferred`].
    pub fn deferred_on(device: usize, dtype: DType, shape: impl AsRef<[usize]>) -> Result<Self> {
        Self::without_memory(dtype, shape.as_ref(), Some(raw::int32("the device", device)?))
    }

    fn without_memory(dtype: DType, shape: &[usize], device: Option<i32>) -> Result<Self> {
        Ok(Tensor(Rc::new(Memory {
            data: std::ptr::null_mut(),
            len: count(shape)?,
            dtype,
            shape: shape.iter().map(|&size| raw::int64("a size", size)).collect::<Result<_>>()?,
            access: Access(Cell::new(Access::DEFERRED)),
            device,
            shared: false,
            _owner: None,
        })))
    }

    pub(crate) fn is_deferred(&self) -> bool {
        self.0.access.0.get() == Access::DEFERRED
    }

    /// A tensor over memory that the library owns.
    ///
    /// # Safety
    /// `view` is contiguous, and its memory outlives every use of the tensor and of its clones.
    pub(crate) unsafe fn borrowed(view: &sys::tsr_tensor) -> Result<Self> {
        let dtype = DType::from_raw(view.dtype)
            .ok_or_else(|| Error::state(format!("the library returned a tensor of unknown dtype {}", view.dtype)))?;
        let ndim = usize::try_from(view.ndim).unwrap_or(0);
        // SAFETY: a tensor's shape holds ndim numbers; it is not read if there are none.
        let shape: Box<[i64]> =
            if ndim == 0 { Box::new([]) } else { unsafe { std::slice::from_raw_parts(view.shape, ndim) }.into() };
        let len = shape.iter().map(|&size| usize::try_from(size).unwrap_or(0)).product();
        // SAFETY: the offset lies inside the allocation, or is 0.
        let data = unsafe { view.data.cast::<u8>().add(usize::try_from(view.byte_offset).unwrap_or(0)) };
        let access = Access::free();
        let device = (view.device_type == sys::TSR_DEVICE_CUDA).then_some(view.device_index);
        Ok(Tensor(Rc::new(Memory {
            data: data.cast(),
            len,
            dtype,
            shape,
            access,
            device,
            shared: false,
            _owner: None,
        })))
    }

    /// The same of memory that `owner` keeps.
    ///
    /// # Safety
    /// `view` is contiguous, and its memory is there as long as `owner`.
    pub(crate) unsafe fn owned_by(view: &sys::tsr_tensor, owner: Box<dyn Any>) -> Result<Self> {
        // SAFETY: the tensor and its clones keep the owner.
        let mut tensor = unsafe { Self::borrowed(view) }?;
        if let Some(memory) = Rc::get_mut(&mut tensor.0) {
            memory._owner = Some(owner);
        }
        Ok(tensor)
    }

    /// The same of memory that other ranks have too.
    ///
    /// # Safety
    /// As [`Tensor::borrowed`]; and no rank writes it while another may have a view.
    pub(crate) unsafe fn shared_with_ranks(view: &sys::tsr_tensor) -> Result<Self> {
        // SAFETY: the caller's word.
        let mut tensor = unsafe { Self::borrowed(view) }?;
        if let Some(memory) = Rc::get_mut(&mut tensor.0) {
            memory.shared = true;
        }
        Ok(tensor)
    }

    pub(crate) fn check_own(&self) -> Result<()> {
        if self.0.shared {
            return Err(Error::state(
                "the ranks of the host share this parameter (share_params): it belongs to the model, and only the \
                 optimizer and loads may write to it",
            ));
        }
        Ok(())
    }

    /// The address, the shape and the device of a tensor on a device.
    pub(crate) fn on_device(&self) -> Option<(usize, Vec<i64>, i32)> {
        self.0
            .device
            .filter(|_| !self.is_deferred())
            .map(|device| (self.0.data as usize, self.0.shape.to_vec(), device))
    }

    pub(crate) fn check_on_cpu(&self) -> Result<()> {
        match self.0.device {
            None => Ok(()),
            Some(device) => {
                Err(Error::argument(format!("the tensor is on CUDA device {device}, whose memory has no view")))
            }
        }
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The sizes; empty for a 0-d tensor, which has one element.
    pub fn shape(&self) -> Vec<usize> {
        self.0.shape.iter().map(|&size| usize::try_from(size).unwrap_or(0)).collect()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The elements, in row-major order, to read.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): the dtype differs;
    /// [`Code::InvalidState`](crate::Code::InvalidState): a mutable view is alive, or the library is writing.
    pub fn view<T: Element>(&self) -> Result<View<'_, T>> {
        self.check_dtype(T::DTYPE)?;
        self.check_on_cpu()?;
        self.0.access.check_readable()?;
        let counter = &self.0.access.0;
        counter.set(counter.get() + 1);
        // SAFETY: dtype and length are right, and until the counter is 0 again nothing writes.
        Ok(View { elements: unsafe { slice(self.0.data.cast(), self.0.len) }, counter })
    }

    /// The elements, in row-major order, to write.
    ///
    /// # Errors
    /// As [`Tensor::view`], and [`Code::InvalidState`](crate::Code::InvalidState) while any view is alive.
    pub fn view_mut<T: Element>(&self) -> Result<ViewMut<'_, T>> {
        self.check_dtype(T::DTYPE)?;
        self.check_on_cpu()?;
        self.check_own()?;
        self.0.access.check_writable()?;
        let counter = &self.0.access.0;
        counter.set(Access::WRITER);
        // SAFETY: dtype and length are right, and until the counter is 0 again nobody else reads or writes.
        Ok(ViewMut { elements: unsafe { slice_mut(self.0.data.cast(), self.0.len) }, counter })
    }

    /// The bytes of the elements, whatever their type.
    ///
    /// # Errors
    /// [`Code::InvalidState`](crate::Code::InvalidState), as [`Tensor::view`].
    pub fn bytes(&self) -> Result<View<'_, u8>> {
        self.check_on_cpu()?;
        self.0.access.check_readable()?;
        let counter = &self.0.access.0;
        counter.set(counter.get() + 1);
        // SAFETY: every element type is plain data of that size; nothing writes until the counter is 0 again.
        Ok(View { elements: unsafe { slice(self.0.data.cast(), self.0.len * self.0.dtype.size()) }, counter })
    }

    /// The bytes of the elements, to write. Every bit pattern is a value of every element type.
    ///
    /// # Errors
    /// [`Code::InvalidState`](crate::Code::InvalidState), as [`Tensor::view_mut`].
    pub fn bytes_mut(&self) -> Result<ViewMut<'_, u8>> {
        self.check_on_cpu()?;
        self.check_own()?;
        self.0.access.check_writable()?;
        let counter = &self.0.access.0;
        counter.set(Access::WRITER);
        // SAFETY: as above, and nobody else reads or writes.
        Ok(ViewMut { elements: unsafe { slice_mut(self.0.data.cast(), self.0.len * self.0.dtype.size()) }, counter })
    }

    /// A copy of the elements.
    ///
    /// # Errors
    /// As [`Tensor::view`].
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.view::<T>()?.to_vec())
    }

    pub(crate) fn check_dtype(&self, asked: DType) -> Result<()> {
        if self.0.dtype == asked {
            Ok(())
        } else {
            Err(Error::argument(format!("the tensor's elements are {}, not {asked}", self.0.dtype)))
        }
    }

    /// The C view of this tensor, valid as long as the tensor.
    pub(crate) fn as_raw(&self) -> sys::tsr_tensor {
        let mut raw = raw_tensor(self.0.data, &self.0.shape, self.0.dtype);
        if let Some(device) = self.0.device {
            (raw.device_type, raw.device_index) = (sys::TSR_DEVICE_CUDA, device);
        }
        raw
    }

    /// # Errors
    /// If the library must not read the memory now; `name` says which tensor that is.
    pub(crate) fn check_readable(&self, name: &dyn fmt::Display) -> Result<()> {
        self.0.access.check_readable().map_err(|error| named(name, &error))
    }

    /// # Errors
    /// If the library must not write the memory now; `name` says which tensor that is.
    pub(crate) fn check_writable(&self, name: &dyn fmt::Display) -> Result<()> {
        self.0.access.check_writable().map_err(|error| named(name, &error))
    }

    /// Lends the memory to the library until [`Tensor::take_back`]; no view can be created meanwhile.
    pub(crate) fn lend(&self, name: &dyn fmt::Display) -> Result<()> {
        self.check_writable(name)?;
        self.0.access.0.set(Access::LIBRARY);
        Ok(())
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.0.access.0.get() == Access::LIBRARY
    }

    pub(crate) fn take_back(&self) {
        if self.is_lent() {
            self.0.access.0.set(0);
        }
    }
}

/// What a call does with tensors.
#[derive(Clone, Copy)]
pub(crate) enum Use {
    Reads,
    Writes,
}

/// The tensors of a call into the library, while it runs.
pub(crate) struct Held<'t> {
    tensors: Vec<&'t Tensor>,
    how: Use,
}

impl<'t> Held<'t> {
    /// # Errors
    /// If one of them cannot currently be used in this way; the message names it. The same tensor may occur twice.
    pub(crate) fn new<N: fmt::Display>(tensors: impl Iterator<Item = (N, &'t Tensor)>, how: Use) -> Result<Self> {
        let permitted = match how {
            Use::Reads => Access::check_readable,
            Use::Writes => Access::check_writable,
        };
        let tensors = tensors
            .map(|(name, tensor)| permitted(&tensor.0.access).map_err(|error| named(&name, &error)).map(|()| tensor))
            .collect::<Result<Vec<_>>>()?;
        for Tensor(memory) in &tensors {
            let counter = &memory.access.0;
            counter.set(match how {
                Use::Reads => counter.get() + 1,
                Use::Writes => Access::LIBRARY,
            });
        }
        Ok(Held { tensors, how })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for Tensor(memory) in &self.tensors {
            let counter = &memory.access.0;
            counter.set(match self.how {
                Use::Reads => counter.get() - 1,
                Use::Writes => 0,
            });
        }
    }
}

fn named(name: &dyn fmt::Display, error: &Error) -> Error {
    Error::new(error.code(), format!("{name}: {}", error.message()))
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}, {:?})", self.0.dtype, self.0.shape)
    }
}

/// What can become a [`Tensor`]: `(Vec<T>, shape)`, a tensor, a [`CudaTensor`](crate::CudaTensor), and with the feature `ndarray` an
/// `ndarray::Array`.
pub trait IntoTensor {
    /// The tensor.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): data and shape do not fit.
    fn into_tensor(self) -> Result<Tensor>;
}

impl<T: Element, S: AsRef<[usize]>> IntoTensor for (Vec<T>, S) {
    fn into_tensor(self) -> Result<Tensor> {
        Tensor::new(self.0, self.1)
    }
}

impl IntoTensor for Tensor {
    fn into_tensor(self) -> Result<Tensor> {
        Ok(self)
    }
}

impl IntoTensor for &Tensor {
    fn into_tensor(self) -> Result<Tensor> {
        Ok(self.clone())
    }
}

/// A tensor of a checkpoint or a state, without its data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its global shape.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// # Safety
    /// A C string, and `ndim` sizes.
    pub(crate) unsafe fn new(name: *const c_char, dtype: i32, shape: *const i64, ndim: i32) -> Result<Self> {
        let (name, shape) = unsafe { (raw::text(name), slice(shape, usize::try_from(ndim).unwrap_or(0))) };
        let dtype = DType::from_raw(dtype)
            .ok_or_else(|| Error::new(Code::Version, format!("{name} has the unknown dtype {dtype}")))?;
        Ok(TensorInfo { name, dtype, shape: shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect() })
    }
}

/// A tensor's elements, to read; derefs to a slice.
pub struct View<'a, T> {
    elements: &'a [T],
    counter: &'a Cell<isize>,
}

impl<T> Deref for View<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.elements
    }
}

impl<T> Drop for View<'_, T> {
    fn drop(&mut self) {
        self.counter.set(self.counter.get() - 1);
    }
}

impl<T: fmt::Debug> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.elements.fmt(f)
    }
}

/// A tensor's elements, to write; derefs to a mutable slice.
pub struct ViewMut<'a, T> {
    elements: &'a mut [T],
    counter: &'a Cell<isize>,
}

impl<T> Deref for ViewMut<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.elements
    }
}

impl<T> DerefMut for ViewMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.elements
    }
}

impl<T> Drop for ViewMut<'_, T> {
    fn drop(&mut self) {
        self.counter.set(0);
    }
}

impl<T: fmt::Debug> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.elements.fmt(f)
    }
}

/// A view of memory outside of tensors; `counter` is 0 while there is no view.
///
/// # Safety
/// `data` points to `len` elements, which during `'a` only views with this counter access; it may be null if `len` is 0.
pub(crate) unsafe fn view_mut<T>(data: *mut T, len: usize, counter: &Cell<isize>) -> Result<ViewMut<'_, T>> {
    if counter.get() != 0 {
        return Err(Error::state("a mutable view of the tensor is alive; drop it first"));
    }
    counter.set(Access::WRITER);
    // SAFETY: the caller's promise, and there is no other view.
    Ok(ViewMut { elements: unsafe { slice_mut(data, len) }, counter })
}

/// # Safety
/// `data` points to `len` elements that nothing writes during `'a`; it may be null if `len` is 0.
pub(crate) unsafe fn slice<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        &[]
    } else {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(data, len) }
    }
}

/// # Safety
/// `data` points to `len` elements that nobody else reads or writes during `'a`; it may be null if `len` is 0.
pub(crate) unsafe fn slice_mut<'a, T>(data: *mut T, len: usize) -> &'a mut [T] {
    if len == 0 {
        &mut []
    } else {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(data, len) }
    }
}

/// A contiguous CPU tensor as C sees it; it borrows `data` and `shape`.
pub(crate) fn raw_tensor(data: *mut c_void, shape: &[i64], dtype: DType) -> sys::tsr_tensor {
    sys::tsr_tensor {
        data,
        shape: shape.as_ptr(),
        strides: std::ptr::null(),
        ndim: i32::try_from(shape.len()).unwrap_or(i32::MAX), // the library refuses more than 8
        dtype: dtype.as_raw(),
        device_type: sys::TSR_DEVICE_CPU,
        device_index: 0,
        byte_offset: 0,
        reserved: [0; 3],
    }
}

/// The shape of a slice. Slices have at most `isize::MAX` elements.
pub(crate) fn flat_shape(len: usize) -> [i64; 1] {
    [i64::try_from(len).unwrap_or(i64::MAX)]
}

pub(crate) fn count(shape: &[usize]) -> Result<usize> {
    shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size)).ok_or_else(|| too_large(shape))
}

/// Zeros, aligned for every dtype; `None` if there is no memory, for which `vec!` would end the process.
fn zeroed_words(len: usize) -> Option<Vec<u64>> {
    if len == 0 {
        return Some(Vec::new());
    }
    let layout = Layout::array::<u64>(len).ok()?;
    // SAFETY: the layout is not of size 0; the memory is the global allocator's, and of `len` initialized words.
    unsafe {
        let words = alloc_zeroed(layout).cast::<u64>();
        (!words.is_null()).then(|| Vec::from_raw_parts(words, len, len))
    }
}

fn too_large(shape: &[usize]) -> Error {
    Error::argument(format!("a tensor of shape {shape:?} exceeds the address space"))
}
