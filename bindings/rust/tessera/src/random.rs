//! Random numbers that do not depend on how a tensor is distributed.
//!
//! The number of an element follows from the seed, the stream and the element's row-major index in the full tensor alone.
//! A slice or a shard has, bit for bit, the numbers that the same call writes into the full tensor on one rank, in every
//! language. They are Philox4x32-10's (Salmon et al. 2011).
//!
//! Different seeds and streams give unrelated numbers: use, for example, one seed per run and one stream per parameter or
//! step. `part` is `None` if `out` is the full tensor. With a [`Layout`] and a rank, `out` is what this rank holds of the
//! layout's tensor, its boxes one after another, as the slices of a [`TensorParallel`](crate::TensorParallel) model and
//! the shards of an [`Fsdp`](crate::Fsdp) are; it may be empty.
//!
//! ```
//! # fn main() -> tessera::Result<()> {
//! use tessera::{random, Layout, Placement};
//! let (mut full, mut half) = (vec![0.0f32; 12], vec![0.0f32; 6]);
//! random::normal(&mut full, 7, 0, 0.0, 0.02, None)?;
//! let rows = Layout::new(&[4, 3], &[2], &[Placement::Shard(0)])?;
//! random::normal(&mut half, 7, 0, 0.0, 0.02, Some((&rows, 1)))?;
//! assert_eq!(half, full[6..]);
//! # Ok(()) }
//! ```

use std::ptr;

use tessera_sys as sys;

use crate::element::Element;
use crate::error::{check, Result};
use crate::layout::Layout;
use crate::raw;
use crate::tensor::{flat_shape, raw_tensor};

/// Fills `out` with numbers from `low` to below `high`, also after rounding to the type of the elements: `f32`, `f64` or
/// those of the crate `half`.
///
/// # Errors
/// `InvalidArgument`: the range, the type or the number of elements is wrong; the message has the right number.
pub fn uniform<T: Element>(
    out: &mut [T],
    seed: u64,
    stream: u64,
    low: f64,
    high: f64,
    part: Option<(&Layout, usize)>,
) -> Result<()> {
    fill(out, part, |output, layout, rank| {
        // SAFETY: output and layout are alive, for this and the calls below.
        unsafe { sys::tsr_random_uniform(output, seed, stream, low, high, layout, rank) }
    })
}

/// Fills `out` with normally distributed numbers, of the types that [`uniform`] has.
///
/// # Errors
/// `InvalidArgument`: a number is not finite, the deviation is negative, or the type or the number of elements is wrong.
pub fn normal<T: Element>(
    out: &mut [T],
    seed: u64,
    stream: u64,
    mean: f64,
    deviation: f64,
    part: Option<(&Layout, usize)>,
) -> Result<()> {
    fill(out, part, |output, layout, rank| {
        // SAFETY: see `uniform`.
        unsafe { sys::tsr_random_normal(output, seed, stream, mean, deviation, layout, rank) }
    })
}

/// Fills `out` with 1 with the probability `p`, otherwise 0: a dropout mask that keeps a share `p`. Elements of any type.
///
/// # Errors
/// `InvalidArgument`: `p` is not a probability, or the number of elements is wrong.
pub fn bernoulli<T: Element>(
    out: &mut [T],
    seed: u64,
    stream: u64,
    p: f64,
    part: Option<(&Layout, usize)>,
) -> Result<()> {
    fill(out, part, |output, layout, rank| {
        // SAFETY: see `uniform`.
        unsafe { sys::tsr_random_bernoulli(output, seed, stream, p, layout, rank) }
    })
}

fn fill<T: Element>(
    out: &mut [T],
    part: Option<(&Layout, usize)>,
    call: impl FnOnce(*const sys::tsr_tensor, *const sys::tsr_layout, i32) -> sys::tsr_status,
) -> Result<()> {
    crate::load()?;
    let shape = flat_shape(out.len());
    let output = raw_tensor(out.as_mut_ptr().cast(), &shape, T::DTYPE);
    let (layout, rank) = match part {
        Some((layout, rank)) => (layout.as_ptr(), raw::int32("the rank", rank)?),
        None => (ptr::null(), 0),
    };
    check(call(&output, layout, rank))
}
