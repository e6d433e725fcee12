//! Synchronous collectives and messages.

use std::ptr;

use tessera_sys as sys;

use super::Comm;
use crate::element::{Element, ReduceOp};
use crate::error::{check, Error, Result};
use crate::raw;
use crate::tensor::{flat_shape, raw_tensor};

/// # Collectives
/// Each returns when the operation is done on this rank. Errors common to all: `InvalidArgument`; `InvalidState` after
/// [`Comm::finalize`]; `Mismatch`: ranks differ in operation, dtype, count or root; the message names the ranks and the
/// difference, and nothing was overwritten; `Timeout`: a rank did not call in time; `PeerLost`; `Aborted`;
/// `Unsupported`: a reduction of a dtype that cannot be reduced; `Interrupted`.
impl Comm {
    /// Reduces `data` over the ranks in place. Every rank gets the same bits.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.all_reduce_many(&mut [data], op)
    }

    /// [`Comm::all_reduce`] of several slices in one operation; the same number on every rank.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_reduce_many<T: Element>(&self, data: &mut [&mut [T]], op: ReduceOp) -> Result<()> {
        in_place(data, |tensors| {
            // SAFETY: the slices are borrowed mutably for the call, which returns when it is done with them.
            check(unsafe {
                let (n, op, stream, work) = (tensors.len(), op.as_raw(), ptr::null_mut(), ptr::null_mut());
                sys::tsr_comm_all_reduce(self.as_ptr(), tensors.as_ptr(), n, op, stream, work)
            })
        })
    }

    /// Reduces `input`; rank r's `output` gets the r-th of world-size equal parts of the result.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let shapes = (flat_shape(input.len()), flat_shape(output.len()));
        let (input, output) = (reading(input, &shapes.0), writing(output, &shapes.1));
        // SAFETY: the slices are borrowed for the call, which returns when it is done with them; so below.
        check(unsafe {
            let (op, stream, work) = (op.as_raw(), ptr::null_mut(), ptr::null_mut());
            sys::tsr_comm_reduce_scatter(self.as_ptr(), &input, &output, op, stream, work)
        })
    }

    /// Concatenates all ranks' `input` in rank order; `output` is world-size times as long.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let shapes = (flat_shape(input.len()), flat_shape(output.len()));
        let (input, output) = (reading(input, &shapes.0), writing(output, &shapes.1));
        check(unsafe { sys::tsr_comm_all_gather(self.as_ptr(), &input, &output, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Several [`Comm::reduce_scatter`] in one operation, of `inputs[i]` into `outputs[i]`: the ranks synchronise once,
    /// and small slices are sent together.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn reduce_scatter_coalesced<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        pairs(inputs, outputs, |inputs, outputs| {
            check(unsafe {
                let (n, op, stream, work) = (inputs.len(), op.as_raw(), ptr::null_mut(), ptr::null_mut());
                sys::tsr_comm_reduce_scatter_coalesced(
                    self.as_ptr(),
                    inputs.as_ptr(),
                    outputs.as_ptr(),
                    n,
                    op,
                    stream,
                    work,
                )
            })
        })
    }

    /// Several [`Comm::all_gather`] in one operation, of `inputs[i]` into `outputs[i]`: the ranks synchronise once, and
    /// small slices are sent together.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_gather_coalesced<T: Element>(&self, inputs: &[&[T]], outputs: &mut [&mut [T]]) -> Result<()> {
        pairs(inputs, outputs, |inputs, outputs| {
            check(unsafe {
                let (n, stream, work) = (inputs.len(), ptr::null_mut(), ptr::null_mut());
                sys::tsr_comm_all_gather_coalesced(self.as_ptr(), inputs.as_ptr(), outputs.as_ptr(), n, stream, work)
            })
        })
    }

    /// Gathers inputs of different lengths: `outputs[r]` receives rank r's `input`. One output per rank, with the same
    /// lengths on every rank.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_gather_v<T: Element>(&self, input: &[T], outputs: &mut [&mut [T]]) -> Result<()> {
        let world_size = self.world_size()?;
        if outputs.len() != world_size {
            return Err(Error::argument(format!(
                "all_gather_v needs one output per rank; got {} for {world_size} ranks",
                outputs.len()
            )));
        }
        let shape = flat_shape(input.len());
        let input = reading(input, &shape);
        in_place(outputs, |outputs| {
            check(unsafe {
                let (stream, work) = (ptr::null_mut(), ptr::null_mut());
                sys::tsr_comm_all_gather_v(self.as_ptr(), &input, outputs.as_ptr(), stream, work)
            })
        })
    }

    /// Broadcasts the root's `data` to every rank.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.broadcast_many(&mut [data], root)
    }

    /// [`Comm::broadcast`] of several slices in one operation; the same number on every rank.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn broadcast_many<T: Element>(&self, data: &mut [&mut [T]], root: usize) -> Result<()> {
        let root = raw::int32("the root", root)?;
        in_place(data, |tensors| {
            check(unsafe {
                let (n, stream, work) = (tensors.len(), ptr::null_mut(), ptr::null_mut());
                sys::tsr_comm_broadcast(self.as_ptr(), tensors.as_ptr(), n, root, stream, work)
            })
        })
    }

    /// Reduces `input` into the root's `output`; only the root passes one.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn reduce<T: Element>(&self, input: &[T], output: Option<&mut [T]>, op: ReduceOp, root: usize) -> Result<()> {
        let root = raw::int32("the root", root)?;
        let shapes = (flat_shape(input.len()), output_shape(&output));
        let (input, output) = (reading(input, &shapes.0), output.map(|output| writing(output, &shapes.1)));
        check(unsafe {
            let (op, stream, work) = (op.as_raw(), ptr::null_mut(), ptr::null_mut());
            sys::tsr_comm_reduce(self.as_ptr(), &input, optional(&output), op, root, stream, work)
        })
    }

    /// Concatenates all ranks' `input` in the root's `output`, which is world-size times as long; only the root passes
    /// one.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn gather<T: Element>(&self, input: &[T], output: Option<&mut [T]>, root: usize) -> Result<()> {
        let root = raw::int32("the root", root)?;
        let shapes = (flat_shape(input.len()), output_shape(&output));
        let (input, output) = (reading(input, &shapes.0), output.map(|output| writing(output, &shapes.1)));
        check(unsafe {
            let (stream, work) = (ptr::null_mut(), ptr::null_mut());
            sys::tsr_comm_gather(self.as_ptr(), &input, optional(&output), root, stream, work)
        })
    }

    /// Sends rank r the r-th of world-size equal parts of the root's `input`; only the root passes one.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn scatter<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result<()> {
        let root = raw::int32("the root", root)?;
        let shapes = (flat_shape(input.map_or(0, <[T]>::len)), flat_shape(output.len()));
        let (input, output) = (input.map(|input| reading(input, &shapes.0)), writing(output, &shapes.1));
        check(unsafe {
            let (stream, work) = (ptr::null_mut(), ptr::null_mut());
            sys::tsr_comm_scatter(self.as_ptr(), optional(&input), &output, root, stream, work)
        })
    }

    /// Sends the r-th of world-size equal parts of `input` to rank r; parts arrive in `output`, which has the same
    /// length, in rank order.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let shapes = (flat_shape(input.len()), flat_shape(output.len()));
        let (input, output) = (reading(input, &shapes.0), writing(output, &shapes.1));
        check(unsafe { sys::tsr_comm_all_to_all(self.as_ptr(), &input, &output, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Sends `data` to rank `peer`, which receives it with the same tag (0 to 2^31 - 1). Not collective.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn send<T: Element>(&self, data: &[T], peer: usize, tag: usize) -> Result<()> {
        let (peer, tag) = (raw::int32("the peer", peer)?, raw::int32("the tag", tag)?);
        let shape = flat_shape(data.len());
        let tensor = reading(data, &shape);
        check(unsafe { sys::tsr_comm_send(self.as_ptr(), &tensor, peer, tag, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Receives data that rank `peer` sends with the same tag, dtype and length. Not collective.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn recv<T: Element>(&self, data: &mut [T], peer: usize, tag: usize) -> Result<()> {
        let (peer, tag) = (raw::int32("the peer", peer)?, raw::int32("the tag", tag)?);
        let shape = flat_shape(data.len());
        let tensor = writing(data, &shape);
        check(unsafe { sys::tsr_comm_recv(self.as_ptr(), &tensor, peer, tag, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// See [Collectives](#collectives).
    pub fn barrier(&self) -> Result<()> {
        check(unsafe { sys::tsr_comm_barrier(self.as_ptr(), ptr::null_mut()) })
    }
}

/// C's view of a slice that it only reads.
fn reading<T: Element>(data: &[T], shape: &[i64; 1]) -> sys::tsr_tensor {
    raw_tensor(data.as_ptr().cast_mut().cast(), shape, T::DTYPE)
}

fn writing<T: Element>(data: &mut [T], shape: &[i64; 1]) -> sys::tsr_tensor {
    raw_tensor(data.as_mut_ptr().cast(), shape, T::DTYPE)
}

fn output_shape<T>(output: &Option<&mut [T]>) -> [i64; 1] {
    flat_shape(output.as_ref().map_or(0, |output| output.len()))
}

fn optional(tensor: &Option<sys::tsr_tensor>) -> *const sys::tsr_tensor {
    tensor.as_ref().map_or(ptr::null(), |tensor| tensor)
}

fn pairs<T: Element>(
    inputs: &[&[T]],
    outputs: &mut [&mut [T]],
    body: impl FnOnce(&[sys::tsr_tensor], &[sys::tsr_tensor]) -> Result<()>,
) -> Result<()> {
    if inputs.len() != outputs.len() {
        let (ins, outs) = (inputs.len(), outputs.len());
        return Err(Error::argument(format!("got {ins} inputs and {outs} outputs; pass them in pairs")));
    }
    let shapes: Vec<_> = inputs.iter().map(|data| flat_shape(data.len())).collect();
    let inputs: Vec<_> = inputs.iter().zip(&shapes).map(|(data, shape)| reading(data, shape)).collect();
    in_place(outputs, |outputs| body(&inputs, outputs))
}

fn in_place<T: Element, R>(data: &mut [&mut [T]], body: impl FnOnce(&[sys::tsr_tensor]) -> R) -> R {
    if let [data] = data {
        let shape = flat_shape(data.len());
        return body(&[writing(data, &shape)]); // the common case needs no allocation
    }
    let shapes: Vec<_> = data.iter().map(|data| flat_shape(data.len())).collect();
    let tensors: Vec<_> = data.iter_mut().zip(&shapes).map(|(data, shape)| writing(data, shape)).collect();
    body(&tensors)
}
