//! An n-dimensional named arrangement of ranks.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use tessera_sys as sys;

use crate::comm::{Comm, Owner};
use crate::error::{check, Code, Error, Result};
use crate::raw;
use crate::store::created;

/// The ranks of a communicator in rows and columns, with a communicator for each dimension: of the ranks that differ in
/// that coordinate alone.
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

// SAFETY: all functions but destroy take it `const`, which the C API defines as thread-safe; its communicators are
// guarded by `Comm`'s rules.
unsafe impl Send for MeshHandle {}
unsafe impl Sync for MeshHandle {}

impl Drop for MeshHandle {
    fn drop(&mut self) {
        // SAFETY: this was the last owner.
        unsafe { sys::tsr_mesh_destroy(self.0.as_ptr()) }
    }
}

impl Mesh {
    /// Arranges the ranks of `comm`, row-major. The product of the sizes is the world size. Collective.
    ///
    /// # Errors
    /// `InvalidArgument`, `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn new(comm: &Comm, dims: &[(&str, usize)]) -> Result<Self> {
        let names = dims.iter().map(|(name, _)| raw::c_string("the name", name)).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let sizes = dims.iter().map(|&(_, size)| raw::int32("a size", size)).collect::<Result<Vec<_>>>()?;
        let ndim = raw::int32("the number of dimensions", dims.len())?;
        let mut handle = ptr::null_mut();
        // SAFETY: all arguments are borrowed for the call.
        check(unsafe { sys::tsr_mesh_create(comm.as_ptr(), pointers.as_ptr(), sizes.as_ptr(), ndim, &mut handle) })?;
        let handle = Arc::new(MeshHandle(created(handle)?));
        let mut comms = Vec::with_capacity(dims.len());
        for ((name, _), c_name) in dims.iter().zip(&names) {
            let mut ptr = ptr::null_mut();
            // SAFETY: the communicator is the mesh's, which the new object keeps.
            check(unsafe { sys::tsr_mesh_comm(handle.0.as_ptr(), c_name.as_ptr(), &mut ptr) })?;
            let owner = Owner::Mesh { _mesh: Arc::clone(&handle), _store: comm.store() };
            comms.push(((*name).to_owned(), Comm::from_raw(created(ptr)?, owner)));
        }
        Ok(Mesh { dims: comms, handle })
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
    /// `NotFound`: there is no such dimension.
    pub fn size(&self, name: &str) -> Result<usize> {
        Ok(self.dim(name)?.0)
    }

    /// This rank's coordinate in dimension `name`.
    ///
    /// # Errors
    /// `NotFound`: there is no such dimension.
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
    /// `NotFound`: there is no such dimension.
    pub fn comm(&self, name: &str) -> Result<&Comm> {
        self.dims.iter().find(|(other, _)| other == name).map(|(_, comm)| comm).ok_or_else(|| {
            let names: Vec<_> = self.dims.iter().map(|(name, _)| name.as_str()).collect();
            Error::new(Code::NotFound, format!("the mesh has no dimension {name:?}; it has {}", names.join(", ")))
        })
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.dims.iter().map(|(name, comm)| (name, comm.world_size().unwrap_or(0)))).finish()
    }
}
