//! Collectives and messages in the background.

use std::ptr;

use tessera_sys as sys;

use super::Comm;
use crate::buffer::OwnedSlice;
use crate::element::ReduceOp;
use crate::error::Result;
use crate::raw;
use crate::work::{Views, Work};

/// # Asynchronous operations
/// Each immediately returns a [`Work`] that owns the buffers until the operation is done; operations run in the order
/// in which they were issued. Buffers are a `Vec`, a boxed slice or a [`Buffer`](crate::Buffer). Errors: see
/// [Collectives](#collectives); later errors come from the work.
impl Comm {
    /// [`Comm::all_reduce`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn all_reduce_async<B: OwnedSlice>(&self, mut data: B, op: ReduceOp) -> Result<Work<B>> {
        let views = Views::default().of(data.as_mut_ptr(), data.len());
        // SAFETY: the work keeps data and views; the C function starts one operation on them; so below.
        unsafe {
            Work::start(data, views, |tensors, work| {
                sys::tsr_comm_all_reduce(self.as_ptr(), tensors.as_ptr(), 1, op.as_raw(), ptr::null_mut(), work)
            })
        }
    }

    /// [`Comm::broadcast`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn broadcast_async<B: OwnedSlice>(&self, mut data: B, root: usize) -> Result<Work<B>> {
        let root = raw::int32("the root", root)?;
        let views = Views::default().of(data.as_mut_ptr(), data.len());
        unsafe {
            Work::start(data, views, |tensors, work| {
                sys::tsr_comm_broadcast(self.as_ptr(), tensors.as_ptr(), 1, root, ptr::null_mut(), work)
            })
        }
    }

    /// [`Comm::reduce_scatter`], in the background; the work returns `(input, output)`.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn reduce_scatter_async<A, B>(&self, input: A, output: B, op: ReduceOp) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.two(input, output, |input, output, work| unsafe {
            sys::tsr_comm_reduce_scatter(self.as_ptr(), input, output, op.as_raw(), ptr::null_mut(), work)
        })
    }

    /// [`Comm::all_gather`], in the background; the work returns `(input, output)`.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn all_gather_async<A, B>(&self, input: A, output: B) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.two(input, output, |input, output, work| unsafe {
            sys::tsr_comm_all_gather(self.as_ptr(), input, output, ptr::null_mut(), work)
        })
    }

    /// [`Comm::all_to_all`], in the background; the work returns `(input, output)`.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn all_to_all_async<A, B>(&self, input: A, output: B) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        self.two(input, output, |input, output, work| unsafe {
            sys::tsr_comm_all_to_all(self.as_ptr(), input, output, ptr::null_mut(), work)
        })
    }

    /// [`Comm::send`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn send_async<B: OwnedSlice>(&self, mut data: B, peer: usize, tag: usize) -> Result<Work<B>> {
        let (peer, tag) = (raw::int32("the peer", peer)?, raw::int32("the tag", tag)?);
        let views = Views::default().of(data.as_mut_ptr(), data.len());
        unsafe {
            Work::start(data, views, |tensors, work| {
                sys::tsr_comm_send(self.as_ptr(), tensors.as_ptr(), peer, tag, ptr::null_mut(), work)
            })
        }
    }

    /// [`Comm::recv`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn recv_async<B: OwnedSlice>(&self, mut data: B, peer: usize, tag: usize) -> Result<Work<B>> {
        let (peer, tag) = (raw::int32("the peer", peer)?, raw::int32("the tag", tag)?);
        let views = Views::default().of(data.as_mut_ptr(), data.len());
        unsafe {
            Work::start(data, views, |tensors, work| {
                sys::tsr_comm_recv(self.as_ptr(), tensors.as_ptr(), peer, tag, ptr::null_mut(), work)
            })
        }
    }

    /// [`Comm::barrier`], in the background.
    ///
    /// # Errors
    /// See [Asynchronous operations](#asynchronous-operations).
    pub fn barrier_async(&self) -> Result<Work<()>> {
        unsafe { Work::start((), Views::default(), |_, work| sys::tsr_comm_barrier(self.as_ptr(), work)) }
    }

    fn two<A, B>(
        &self,
        mut input: A,
        mut output: B,
        issue: impl FnOnce(*const sys::tsr_tensor, *const sys::tsr_tensor, *mut *mut sys::tsr_work) -> sys::tsr_status,
    ) -> Result<Work<(A, B)>>
    where
        A: OwnedSlice,
        B: OwnedSlice<Element = A::Element>,
    {
        let views = Views::default().of(input.as_mut_ptr(), input.len()).of(output.as_mut_ptr(), output.len());
        unsafe { Work::start((input, output), views, |tensors, work| issue(&tensors[0], &tensors[1], work)) }
    }
}
