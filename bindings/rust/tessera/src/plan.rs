//! Collectives prepared once and launched many times.

use std::fmt;
use std::mem;
use std::ptr::{self, NonNull};
use std::time::Duration;

use tessera_sys as sys;

use crate::buffer::OwnedSlice;
use crate::comm::{Borrowed, Comm};
use crate::element::{Element, ReduceOp};
use crate::error::{check, Code, Result};
use crate::raw::{self, created};
use crate::tensor::{flat_shape, raw_tensor};

/// The collective of a [`Plan`], like the method of [`Comm`] with that name. Collectives in place have their buffers as
/// outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collective {
    /// [`Comm::barrier`].
    Barrier = sys::TSR_COLLECTIVE_BARRIER as isize,
    /// [`Comm::all_reduce_many`].
    AllReduce = sys::TSR_COLLECTIVE_ALL_REDUCE as isize,
    /// [`Comm::reduce_scatter_coalesced`].
    ReduceScatter = sys::TSR_COLLECTIVE_REDUCE_SCATTER as isize,
    /// [`Comm::all_gather_coalesced`].
    AllGather = sys::TSR_COLLECTIVE_ALL_GATHER as isize,
    /// [`Comm::all_gather_v`].
    AllGatherV = sys::TSR_COLLECTIVE_ALL_GATHER_V as isize,
    /// [`Comm::broadcast_many`].
    Broadcast = sys::TSR_COLLECTIVE_BROADCAST as isize,
    /// [`Comm::reduce`].
    Reduce = sys::TSR_COLLECTIVE_REDUCE as isize,
    /// [`Comm::gather`].
    Gather = sys::TSR_COLLECTIVE_GATHER as isize,
    /// [`Comm::scatter`].
    Scatter = sys::TSR_COLLECTIVE_SCATTER as isize,
    /// [`Comm::all_to_all`].
    AllToAll = sys::TSR_COLLECTIVE_ALL_TO_ALL as isize,
}

/// A collective over buffers that it owns, prepared and checked by [`Comm::prepare`]. A launch matches an ordinary call
/// of the same collective on another rank.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{Collective, Comm, ReduceOp};
/// let comm = Comm::from_env()?;
/// let mut plan = comm.prepare(Collective::AllReduce, vec![], vec![vec![1.0f32; 4]], ReduceOp::Sum, 0)?;
/// for _ in 0..3 {
///     plan.outputs()?[0].fill(1.0);
///     plan.run()?;
/// }
/// assert_eq!(plan.outputs()?[0][0], comm.world_size()? as f32);
/// # Ok(()) }
/// ```
pub struct Plan<'c, B: OwnedSlice> {
    handle: NonNull<sys::tsr_plan>,
    inputs: Vec<B>,
    outputs: Vec<B>,
    in_flight: bool, // a start that nobody has seen the end of
    _comm: Borrowed<'c>,
}

impl Comm {
    /// Prepares a collective to be launched many times over the same buffers. `op` is used by reductions, `root` by
    /// collectives that have one. Local.
    ///
    /// # Errors
    /// `InvalidArgument`: the collective does not support these buffers; `InvalidState`, `Aborted`.
    pub fn prepare<B: OwnedSlice>(
        &self,
        collective: Collective,
        mut inputs: Vec<B>,
        mut outputs: Vec<B>,
        op: ReduceOp,
        root: usize,
    ) -> Result<Plan<'_, B>> {
        let root = raw::int32("the root", root)?;
        let shapes = |list: &[B]| list.iter().map(|data| flat_shape(data.len())).collect::<Vec<_>>();
        let (in_shapes, out_shapes) = (shapes(&inputs), shapes(&outputs));
        let (ins, outs) = (views(&mut inputs, &in_shapes), views(&mut outputs, &out_shapes));
        let mut handle = ptr::null_mut();
        // SAFETY: the memory of the buffers lives as long as the plan, the views for the call.
        check(unsafe {
            sys::tsr_plan_create(
                self.as_ptr(),
                collective as i32,
                ins.as_ptr(),
                ins.len(),
                outs.as_ptr(),
                outs.len(),
                op.as_raw(),
                root,
                ptr::null_mut(),
                &mut handle,
            )
        })?;
        Ok(Plan { handle: created(handle)?, inputs, outputs, in_flight: false, _comm: Borrowed::new() })
    }
}

fn views<B: OwnedSlice>(buffers: &mut [B], shapes: &[[i64; 1]]) -> Vec<sys::tsr_tensor> {
    let dtype = <B::Element as Element>::DTYPE;
    buffers.iter_mut().zip(shapes).map(|(data, shape)| raw_tensor(data.as_mut_ptr().cast(), shape, dtype)).collect()
}

/// Slices, not the buffers themselves: replacing a buffer would free memory that the plan uses.
fn elements<B: OwnedSlice>(buffers: &mut [B]) -> Vec<&mut [B::Element]> {
    buffers.iter_mut().map(|data| &mut **data).collect()
}

impl<B: OwnedSlice> Plan<'_, B> {
    /// Launches the collective and waits until it is done.
    ///
    /// # Errors
    /// `InvalidState`: the last launch is not done; those of the collective.
    pub fn run(&mut self) -> Result<()> {
        // SAFETY: the handle is alive, its communicator is used by this thread alone; so below.
        check(unsafe { sys::tsr_plan_run(self.handle.as_ptr()) })
    }

    /// Launches the collective in the background, in the order of the communicator's calls.
    ///
    /// # Errors
    /// `InvalidState`: the previous launch is not done; `Aborted`.
    pub fn start(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_plan_start(self.handle.as_ptr()) })?;
        self.in_flight = true;
        Ok(())
    }

    /// Waits for the last launch, at most until its own deadline.
    ///
    /// # Errors
    /// Those of the collective; `Interrupted`: it continues.
    pub fn wait(&mut self) -> Result<()> {
        self.wait_ms(-1)
    }

    /// Waits at most `timeout` and returns whether it is done.
    ///
    /// # Errors
    /// As [`Plan::wait`].
    pub fn wait_for(&mut self, timeout: Duration) -> Result<bool> {
        match self.wait_ms(raw::milliseconds(timeout)) {
            Ok(()) => Ok(true),
            Err(error) if error.code() == Code::NotReady => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn wait_ms(&mut self, milliseconds: i32) -> Result<()> {
        let result = check(unsafe { sys::tsr_plan_wait(self.handle.as_ptr(), milliseconds) });
        let goes_on = |code| matches!(code, Code::NotReady | Code::Interrupted);
        self.in_flight = self.in_flight && result.as_ref().is_err_and(|error| goes_on(error.code()));
        result
    }

    /// The elements of the inputs, which do not move.
    ///
    /// # Errors
    /// `NotReady`: the last launch is not done.
    pub fn inputs(&mut self) -> Result<Vec<&mut [B::Element]>> {
        self.own()?;
        Ok(elements(&mut self.inputs))
    }

    /// The elements of the outputs, which do not move.
    ///
    /// # Errors
    /// `NotReady`: the last launch is not done.
    pub fn outputs(&mut self) -> Result<Vec<&mut [B::Element]>> {
        self.own()?;
        Ok(elements(&mut self.outputs))
    }

    /// The buffers are nobody else's, however the last launch has ended.
    fn own(&mut self) -> Result<()> {
        if !self.in_flight {
            return Ok(());
        }
        let result = self.wait_ms(0);
        if self.in_flight {
            result
        } else {
            Ok(())
        }
    }
}

impl<B: OwnedSlice> Drop for Plan<'_, B> {
    fn drop(&mut self) {
        if self.own().is_err() {
            // The library still uses them: they are never freed.
            mem::forget(mem::take(&mut self.inputs));
            mem::forget(mem::take(&mut self.outputs));
        }
        // SAFETY: the handle is ours and not used again; a launch goes on without it.
        unsafe { sys::tsr_plan_destroy(self.handle.as_ptr()) }
    }
}

impl<B: OwnedSlice> fmt::Debug for Plan<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}
