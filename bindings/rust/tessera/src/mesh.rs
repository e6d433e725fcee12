//! A named n-dimensional arrangement of ranks.

use std::ffi::CString;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use tessera_sys as sys;

use crate::choices::Creation;
use crate::comm::{Comm, Owner};
use crate::error::{check, Code, Error, Result};
use crate::raw::{self, created};
use crate::store::StoreHandle;

/// A named n-dimensional arrangement of a communicator's ranks, with a communicator for each dimension, of the ranks
/// that differ only in that coordinate.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{Comm, Mesh};
/// let comm = Comm::from_env()?;
/// let mesh = Mesh::new(&comm, &[("dp", comm.world_size()?), ("tp", 1)])?;
/// assert_eq!(mesh.comm("tp")?.world_size()?, 1);
/// # Ok(()) }
/// ```
pub struct Mesh {
    dims: Vec<(String, Comm)>,
    handle: Arc<MeshHandle>,
}

pub(crate) struct MeshHandle(NonNull<sys::tsr_mesh>);

// SAFETY: all functions but two take it `const`, which the C API defines as thread-safe: destroy is the last owner's, and
// the creation of a model is for the thread that has the `Mesh`, which is not Sync. Its communicators are guarded by
// `Comm`'s rules.
unsafe impl Send for MeshHandle {}
unsafe impl Sync for MeshHandle {}

impl Drop for MeshHandle {
    fn drop(&mut self) {
        // SAFETY: this was the last owner.
        unsafe { sys::tsr_mesh_destroy(self.0.as_ptr()) }
    }
}

impl Mesh {
    /// Arranges the ranks of `comm`, row-major. The product of the sizes must be the world size. Collective.
    ///
    /// # Errors
    /// `InvalidArgument`, `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn new(comm: &Comm, dims: &[(&str, usize)]) -> Result<Self> {
        let (names, sizes, ndim) = comm.or_refuse(Creation::Mesh, || {
            let names = dims.iter().map(|(name, _)| raw::c_string("the name", name)).collect::<Result<Vec<_>>>()?;
            let sizes = dims.iter().map(|&(_, size)| raw::int32("a size", size)).collect::<Result<Vec<_>>>()?;
            Ok((names, sizes, raw::int32("the number of dimensions", dims.len())?))
        })?;
        let pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let mut handle = ptr::null_mut();
        // SAFETY: all arguments are borrowed for the call.
        check(unsafe { sys::tsr_mesh_create(comm.as_ptr(), pointers.as_ptr(), sizes.as_ptr(), ndim, &mut handle) })?;
        Self::of(handle, &names, comm)
    }

    /// The mesh `handle` with the dimensions `names`, whose communicators need what `comm` needs.
    fn of(handle: *mut sys::tsr_mesh, names: &[CString], comm: &Comm) -> Result<Self> {
        let handle = Arc::new(MeshHandle(created(handle)?));
        let mut dims = Vec::with_capacity(names.len());
        for name in names {
            let mut ptr = ptr::null_mut();
            // SAFETY: the communicator is the mesh's, which the new object keeps.
            check(unsafe { sys::tsr_mesh_comm(handle.0.as_ptr(), name.as_ptr(), &mut ptr) })?;
            let owner = Owner::Mesh { _mesh: Arc::<MeshHandle>::clone(&handle), _store: comm.store() };
            dims.push((name.to_string_lossy().into_owned(), Comm::from_raw(created(ptr)?, owner)));
        }
        Ok(Mesh { dims, handle })
    }

    /// Some of the dimensions, in this mesh's order, with their communicators.
    ///
    /// # Errors
    /// `NotFound`: the dimension does not exist; `InvalidArgument`: the order differs.
    pub fn slice(&self, names: &[&str]) -> Result<MeshSlice<'_>> {
        let c_names = names.iter().map(|name| raw::c_string("the name", name)).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<_> = c_names.iter().map(|name| name.as_ptr()).collect();
        let ndim = raw::int32("the number of dimensions", names.len())?;
        let mut handle = ptr::null_mut();
        // SAFETY: the handle is alive, the names are borrowed for the call.
        check(unsafe { sys::tsr_mesh_slice(self.handle.0.as_ptr(), pointers.as_ptr(), ndim, &mut handle) })?;
        let handle = MeshHandle(created(handle)?);
        let dims = names.iter().map(|name| Ok(((*name).to_owned(), self.comm(name)?))).collect::<Result<Vec<_>>>()?;
        Ok(MeshSlice { dims, handle })
    }

    /// A one-dimensional mesh of all dimensions of this one, with its own communicator, named `name` (by default the
    /// flattened names, joined by `_`). Collective over `comm`, from which this mesh was made.
    ///
    /// # Errors
    /// `InvalidArgument`: `comm` is another communicator; `Mismatch`: the ranks flatten different dimensions; `Timeout`,
    /// `Aborted`, `PeerLost`, `Interrupted`.
    pub fn flatten(&self, comm: &Comm, name: Option<&str>) -> Result<Mesh> {
        flatten(&self.handle, self.dims.iter().map(|(name, _)| name.as_str()).collect(), comm, name)
    }

    /// The number of dimensions.
    ///
    /// # Errors
    /// None in practice.
    pub fn ndim(&self) -> Result<usize> {
        let mut ndim = 0;
        // SAFETY: the handle is alive.
        check(unsafe { sys::tsr_mesh_ndim(self.handle.0.as_ptr(), &mut ndim) })?;
        Ok(usize::try_from(ndim).unwrap_or(0))
    }

    /// The size of dimension `name`.
    ///
    /// # Errors
    /// `NotFound`: the dimension does not exist.
    pub fn size(&self, name: &str) -> Result<usize> {
        Ok(self.dim(name)?.0)
    }

    /// This rank's coordinate in dimension `name`.
    ///
    /// # Errors
    /// `NotFound`: the dimension does not exist.
    pub fn coordinate(&self, name: &str) -> Result<usize> {
        Ok(self.dim(name)?.1)
    }

    fn dim(&self, name: &str) -> Result<(usize, usize)> {
        let name = raw::c_string("the name", name)?;
        let (mut size, mut coordinate) = (0, 0);
        // SAFETY: the handle is alive, the name is borrowed for the call.
        check(unsafe { sys::tsr_mesh_dim(self.handle.0.as_ptr(), name.as_ptr(), &mut size, &mut coordinate) })?;
        Ok((usize::try_from(size).unwrap_or(1), usize::try_from(coordinate).unwrap_or(0)))
    }

    /// The communicator of dimension `name`.
    ///
    /// # Errors
    /// `NotFound`: the dimension does not exist.
    pub fn comm(&self, name: &str) -> Result<&Comm> {
        find(self.dims.iter().map(|(name, comm)| (name.as_str(), comm)), name)
    }

    /// The communicator of the dimension `name`, by default of the only one.
    pub(crate) fn comm_of(&self, name: Option<&str>) -> Result<&Comm> {
        match (name, self.dims.as_slice()) {
            (Some(name), _) => self.comm(name),
            (None, [(_, comm)]) => Ok(comm),
            (None, dims) => {
                let names: Vec<_> = dims.iter().map(|(name, _)| name.as_str()).collect();
                Err(Error::argument(format!("the mesh has several dimensions; choose one of {names:?}")))
            }
        }
    }

    /// The dimension `name`, by default the only one.
    pub(crate) fn one_dim(&self, name: Option<&str>) -> Result<MeshDim> {
        let comm = self.comm_of(name)?;
        let handle = match name {
            Some(name) => Arc::new(self.slice(&[name])?.handle),
            None => Arc::<MeshHandle>::clone(&self.handle),
        };
        Ok(MeshDim { handle, rank: comm.rank()?, size: comm.world_size()?, _store: comm.store() })
    }
}

/// One dimension as its own mesh, for a model, with what it needs.
pub(crate) struct MeshDim {
    handle: Arc<MeshHandle>,
    rank: usize,
    size: usize,
    _store: Option<Arc<StoreHandle>>, // dropped after the handle
}

impl MeshDim {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_mesh {
        self.handle.0.as_ptr()
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }
}

/// Some of a mesh's dimensions; it borrows the mesh, whose communicators it has.
pub struct MeshSlice<'m> {
    dims: Vec<(String, &'m Comm)>,
    handle: MeshHandle,
}

impl MeshSlice<'_> {
    /// The names of the dimensions, slowest first.
    pub fn names(&self) -> Vec<&str> {
        self.dims.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The communicator of dimension `name`: the mesh's.
    ///
    /// # Errors
    /// `NotFound`: the slice does not have the dimension.
    pub fn comm(&self, name: &str) -> Result<&Comm> {
        find(self.dims.iter().map(|(name, comm)| (name.as_str(), *comm)), name)
    }

    /// [`Mesh::flatten`] of these dimensions. Collective over the communicator from which the mesh was made.
    ///
    /// # Errors
    /// The same errors.
    pub fn flatten(&self, comm: &Comm, name: Option<&str>) -> Result<Mesh> {
        flatten(&self.handle, self.names(), comm, name)
    }
}

impl fmt::Debug for MeshSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.dims.iter().map(|(name, comm)| (name, comm.world_size().unwrap_or(0)))).finish()
    }
}

fn flatten(mesh: &MeshHandle, names: Vec<&str>, comm: &Comm, name: Option<&str>) -> Result<Mesh> {
    let name = comm.or_refuse(Creation::Mesh, || raw::c_string("the name", name.unwrap_or(&names.join("_"))))?;
    let mut handle = ptr::null_mut();
    // SAFETY: both handles are alive, the name is borrowed for the call.
    check(unsafe { sys::tsr_mesh_flatten(mesh.0.as_ptr(), comm.as_ptr(), name.as_ptr(), &mut handle) })?;
    Mesh::of(handle, &[name], comm)
}

fn find<'a>(mut dims: impl Iterator<Item = (&'a str, &'a Comm)> + Clone, name: &str) -> Result<&'a Comm> {
    let names: Vec<_> = dims.clone().map(|(name, _)| name).collect();
    dims.find(|(other, _)| *other == name).map(|(_, comm)| comm).ok_or_else(|| {
        Error::new(Code::NotFound, format!("the mesh has no dimension {name:?}; it has {}", names.join(", ")))
    })
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.dims.iter().map(|(name, comm)| (name, comm.world_size().unwrap_or(0)))).finish()
    }
}
