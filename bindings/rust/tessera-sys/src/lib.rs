//! Declarations of Tessera's C API: one module a header of `capi/include/tessera/`, names and signatures as there. The
//! headers are the reference: what each function does, what it borrows and what it returns is said there alone.
//!
//! The library is opened at run time by [`load`]; every function panics before that has succeeded. `tests/abi.rs`
//! compiles each constant, layout and signature of this crate against the C headers. Use the crate `tessera` for a
//! safe interface.
#![allow(non_camel_case_types)]
#![deny(missing_docs)]

#[macro_use]
mod declare;
mod loader;

mod checkpoint;
mod comm;
mod data;
mod ddp;
mod error;
mod fsdp;
mod grad_scaler;
mod launch;
mod layout;
mod log;
mod memory;
mod mesh;
mod optim;
mod plan;
mod state;
mod storage;
mod store;
mod types;
mod version;

pub use checkpoint::*;
pub use comm::*;
pub use data::*;
pub use ddp::*;
pub use error::*;
pub use fsdp::*;
pub use grad_scaler::*;
pub use launch::*;
pub use layout::*;
pub use loader::{load, Error as LoadError, BUILT_WITH, SONAME};
pub use log::*;
pub use memory::*;
pub use mesh::*;
pub use optim::*;
pub use plan::*;
pub use state::*;
pub use storage::*;
pub use store::*;
pub use types::*;
pub use version::*;

/// What this crate declares, as data: `tests/abi.rs` writes C from it and lets a C compiler judge.
#[doc(hidden)]
pub mod meta {
    pub use crate::declare::{Field, Function, Layout};

    macro_rules! all {
        ($name:ident, $table:ident, $type:ty: $($module:ident)*) => {
            pub fn $name() -> Vec<$type> {
                [$(crate::$module::$table),*].concat()
            }
        };
    }
    all!(functions, FUNCTIONS, Function:
        checkpoint comm data ddp error fsdp grad_scaler launch layout log memory mesh optim plan state storage store version);
    all!(constants, CONSTANTS, (&'static str, i64): checkpoint ddp error fsdp layout log plan storage types version);
    all!(layouts, LAYOUTS, Layout: checkpoint comm data ddp fsdp grad_scaler layout optim state storage store types);

    /// Whether the function of that name was called; known only with the feature `record-calls`.
    #[cfg(feature = "record-calls")]
    pub fn was_called(name: &str) -> bool {
        crate::declare::CALLED.lock().is_ok_and(|called| called.contains(name))
    }
}
