//! How a global tensor is distributed over the ranks. Pure arithmetic; only [`Layout::gather`] communicates.

use std::fmt;
use std::ptr::{self, NonNull};

use tessera_sys as sys;

use crate::comm::Comm;
use crate::error::{check, Error, Result};
use crate::raw::{self, created};

const MAX_NDIM: usize = sys::TSR_MAX_NDIM as usize;

/// How one mesh dimension distributes a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Every rank along it holds the same data.
    Replicate,
    /// This dimension of the tensor is split as `torch.chunk` does: equal parts of `ceil(size / parts)`, then a shorter
    /// one, then empty ones.
    Shard(usize),
}

/// A box of a global tensor: for each of its dimensions the first index and the number of indices.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The first index.
    pub offsets: Vec<usize>,
    /// The number of indices.
    pub sizes: Vec<usize>,
}

/// Which boxes of a global tensor each rank holds.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{Layout, Placement};
/// let layout = Layout::new(&[5, 4], &[2], &[Placement::Shard(0)])?; // 5 rows on 2 ranks
/// assert_eq!(layout.regions(0)?[0].sizes, [3, 4]);
/// assert_eq!(layout.regions(1)?[0].offsets, [3, 0]);
/// # Ok(()) }
/// ```
pub struct Layout {
    handle: NonNull<sys::tsr_layout>,
    ndim: usize,
}

// SAFETY: all functions but destroy take it `const`, which the C API defines as thread-safe.
unsafe impl Send for Layout {}
unsafe impl Sync for Layout {}

impl Layout {
    /// A tensor of `shape` on a mesh of `mesh_sizes` (row-major ranks), with one placement for each mesh dimension,
    /// applied in order.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn new(shape: &[usize], mesh_sizes: &[usize], placements: &[Placement]) -> Result<Self> {
        crate::load()?;
        if mesh_sizes.len() != placements.len() {
            return Err(Error::argument(format!(
                "a layout needs one placement for each mesh dimension; got {} for {}",
                placements.len(),
                mesh_sizes.len()
            )));
        }
        let sizes = shape_of(shape)?;
        let mesh = mesh_sizes.iter().map(|&size| raw::int32("a mesh size", size)).collect::<Result<Vec<_>>>()?;
        let placements = placements
            .iter()
            .map(|placement| {
                Ok(match *placement {
                    Placement::Replicate => sys::tsr_placement { kind: sys::TSR_PLACE_REPLICATE, dim: 0 },
                    Placement::Shard(dim) => sys::tsr_placement {
                        kind: sys::TSR_PLACE_SHARD,
                        dim: raw::int32("the sharded dimension", dim)?,
                    },
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let (ndim, mesh_ndim) = (raw::int32("ndim", sizes.len())?, raw::int32("the mesh's ndim", mesh.len())?);
        let mut handle = ptr::null_mut();
        // SAFETY: all arguments are borrowed for the call.
        check(unsafe {
            let (mesh, placements) = (mesh.as_ptr(), placements.as_ptr());
            sys::tsr_layout_create(sizes.as_ptr(), ndim, mesh, placements, mesh_ndim, &mut handle)
        })?;
        Ok(Layout { handle: created(handle)?, ndim: shape.len() })
    }

    /// A tensor of `shape` of which rank r holds the boxes `regions[r]`. Any two boxes must be equal (replicas) or
    /// disjoint.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn from_regions(shape: &[usize], regions: &[Vec<Region>]) -> Result<Self> {
        crate::load()?;
        let sizes = shape_of(shape)?;
        let boxes = boxes_of(shape, regions.iter().flatten())?;
        let counts =
            regions.iter().map(|boxes| raw::int32("the number of boxes", boxes.len())).collect::<Result<Vec<_>>>()?;
        let (ndim, world_size) = (raw::int32("ndim", sizes.len())?, raw::int32("the world size", counts.len())?);
        let mut handle = ptr::null_mut();
        // SAFETY: all arguments are borrowed for the call; there are as many boxes as the counts add up to.
        check(unsafe {
            let (boxes, counts) = (boxes.as_ptr(), counts.as_ptr());
            sys::tsr_layout_from_boxes(sizes.as_ptr(), ndim, boxes, counts, world_size, &mut handle)
        })?;
        Ok(Layout { handle: created(handle)?, ndim: shape.len() })
    }

    /// A tensor of `shape` of which each rank knows only its own boxes: `regions` are this rank's, in the order of its
    /// pieces. The ranks exchange only their offsets and sizes; all get the layout that
    /// [`from_regions`](Self::from_regions) would make of all boxes. Collective.
    ///
    /// # Errors
    /// On all ranks: `InvalidArgument`, a box lies outside the tensor or two overlap partially, and `Mismatch`, the
    /// ranks pass different shapes; the message names the ranks. `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn gather(comm: &Comm, shape: &[usize], regions: &[Region]) -> Result<Self> {
        let sizes = shape_of(shape)?;
        let boxes = boxes_of(shape, regions.iter())?;
        let (ndim, count) = (raw::int32("ndim", sizes.len())?, raw::int32("the number of boxes", boxes.len())?);
        let mut handle = ptr::null_mut();
        // SAFETY: all arguments are borrowed for the call.
        check(unsafe {
            sys::tsr_layout_gather(comm.as_ptr(), sizes.as_ptr(), ndim, boxes.as_ptr(), count, &mut handle)
        })?;
        Ok(Layout { handle: created(handle)?, ndim: shape.len() })
    }

    /// The boxes that `rank` holds; none of them is empty.
    ///
    /// # Errors
    /// `InvalidArgument`: the rank does not exist.
    pub fn regions(&self, rank: usize) -> Result<Vec<Region>> {
        let rank = raw::int32("the rank", rank)?;
        let mut count = 0;
        // SAFETY: the handle is alive.
        check(unsafe { sys::tsr_layout_box_count(self.as_ptr(), rank, &mut count) })?;
        let numbers = |values: &[i64; MAX_NDIM]| {
            values.iter().take(self.ndim).map(|&value| usize::try_from(value).unwrap_or(0)).collect()
        };
        (0..count)
            .map(|index| {
                let mut raw = sys::tsr_box { offsets: [0; MAX_NDIM], sizes: [0; MAX_NDIM] };
                // SAFETY: the handle is alive.
                check(unsafe { sys::tsr_layout_box(self.as_ptr(), rank, index, &mut raw) })?;
                Ok(Region { offsets: numbers(&raw.offsets), sizes: numbers(&raw.sizes) })
            })
            .collect()
    }

    pub(crate) fn from_raw(handle: NonNull<sys::tsr_layout>, ndim: usize) -> Self {
        Layout { handle, ndim }
    }

    pub(crate) fn as_ptr(&self) -> *const sys::tsr_layout {
        self.handle.as_ptr()
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        unsafe { sys::tsr_layout_destroy(self.handle.as_ptr()) }
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layout").field("ndim", &self.ndim).finish_non_exhaustive()
    }
}

fn boxes_of<'a>(shape: &[usize], regions: impl Iterator<Item = &'a Region>) -> Result<Vec<sys::tsr_box>> {
    regions
        .map(|region| {
            if region.offsets.len() != shape.len() || region.sizes.len() != shape.len() {
                return Err(Error::argument(format!("{region:?} is not a box of a tensor of shape {shape:?}")));
            }
            let mut raw = sys::tsr_box { offsets: [0; MAX_NDIM], sizes: [0; MAX_NDIM] };
            for (i, (&offset, &size)) in region.offsets.iter().zip(&region.sizes).enumerate().take(MAX_NDIM) {
                raw.offsets[i] = raw::int64("an offset", offset)?;
                raw.sizes[i] = raw::int64("a size", size)?;
            }
            Ok(raw)
        })
        .collect()
}

fn shape_of(shape: &[usize]) -> Result<Vec<i64>> {
    shape.iter().map(|&size| raw::int64("a size", size)).collect()
}
