//! `tessera/mesh.h`.

use crate::{tsr_comm, tsr_mesh, tsr_status};
use std::ffi::c_char;

functions! { "mesh":
    fn tsr_mesh_create(
        comm: *mut tsr_comm,
        names: *const *const c_char,
        sizes: *const i32,
        ndim: i32,
        out: *mut *mut tsr_mesh,
    ) -> tsr_status;
    fn tsr_mesh_ndim(mesh: *const tsr_mesh, ndim: *mut i32) -> tsr_status;
    fn tsr_mesh_dim(mesh: *const tsr_mesh, name: *const c_char, size: *mut i32, coordinate: *mut i32) -> tsr_status;
    fn tsr_mesh_comm(mesh: *const tsr_mesh, name: *const c_char, comm: *mut *mut tsr_comm) -> tsr_status;
    fn tsr_mesh_slice(
        mesh: *const tsr_mesh,
        names: *const *const c_char,
        ndim: i32,
        out: *mut *mut tsr_mesh,
    ) -> tsr_status;
    fn tsr_mesh_flatten(
        mesh: *const tsr_mesh,
        comm: *mut tsr_comm,
        name: *const c_char,
        out: *mut *mut tsr_mesh,
    ) -> tsr_status;
    fn tsr_mesh_destroy(mesh: *mut tsr_mesh);
}
