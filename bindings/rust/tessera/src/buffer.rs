//! Memory that a communicator's transport accesses without copies.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

use tessera_sys as sys;

use crate::comm::Comm;
use crate::element::Element;
use crate::error::{check, Error, Result};
use crate::raw::created;
use crate::tensor::{slice, slice_mut};

/// Elements in memory that the ranks of a host share: collectives on it need no staging copy. A zero-initialised slice,
/// aligned to 4096 bytes.
///
/// Peers write to it only during collectives of this rank. Its content is unspecified after a failed collective.
pub struct Buffer<T> {
    handle: NonNull<sys::tsr_buffer>,
    data: *mut c_void,
    len: usize,
    element: PhantomData<T>,
}

// SAFETY: memory and a handle that only this object uses; shared use is reading.
unsafe impl<T: Element> Send for Buffer<T> {}
unsafe impl<T: Element> Sync for Buffer<T> {}

impl Comm {
    /// A buffer of `len` zeros in memory that peers on this host can access. Collective; the same length on every rank.
    ///
    /// # Errors
    /// `Mismatch`: lengths differ; `NoMemory`, `Timeout`, `Aborted`, `PeerLost`, `InvalidArgument`.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        Buffer::new(self, len)
    }
}

impl<T: Element> Buffer<T> {
    fn new(comm: &Comm, len: usize) -> Result<Self> {
        let size = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| Error::argument(format!("a buffer of {len} elements exceeds the address space")))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the communicator is borrowed for the call.
        check(unsafe { sys::tsr_buffer_create(comm.as_ptr(), size, &mut handle) })?;
        let mut buffer = Buffer { handle: created(handle)?, data: ptr::null_mut(), len, element: PhantomData };
        let mut bytes = 0;
        // SAFETY: the handle is alive; the memory lives as long as it.
        check(unsafe { sys::tsr_buffer_data(buffer.handle.as_ptr(), &mut buffer.data, &mut bytes) })?;
        if bytes < size || (buffer.data.is_null() && size > 0) {
            return Err(Error::state(format!("the library returned a buffer of {bytes} bytes, expected {size}")));
        }
        Ok(buffer)
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements, aligned to a page, borrowed with self.
        unsafe { slice(self.data.cast(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, borrowed mutably with self.
        unsafe { slice_mut(self.data.cast(), self.len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again; an operation that uses the memory owns this object.
        unsafe { sys::tsr_buffer_destroy(self.handle.as_ptr()) }
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// What an asynchronous operation can own: `Vec<T>`, `Box<[T]>`, [`Buffer<T>`].
///
/// # Safety
/// The slice stays at its address when the owner is moved, and only the owner accesses it.
pub unsafe trait OwnedSlice: DerefMut<Target = [Self::Element]> + Send + 'static {
    /// The type of the elements.
    type Element: Element;
}

// SAFETY: the elements of all three lie outside the object.
unsafe impl<T: Element> OwnedSlice for Vec<T> {
    type Element = T;
}
unsafe impl<T: Element> OwnedSlice for Box<[T]> {
    type Element = T;
}
unsafe impl<T: Element> OwnedSlice for Buffer<T> {
    type Element = T;
}
