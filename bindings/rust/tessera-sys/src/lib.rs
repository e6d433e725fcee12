//! Declarations of Tessera's C API, generated from its headers, with the same names and signatures. The headers are the
//! reference: only they document what each function does, borrows and returns.
//!
//! The library is opened at run time by [`load`]; every function panics before that has succeeded. `tests/abi.rs`
//! compiles each constant, layout and signature of this crate against the C headers. Use the crate `tessera` for a
//! safe interface.
#![allow(non_camel_case_types)]
#![deny(missing_docs)]

#[macro_use]
mod declare;
#[rustfmt::skip]
mod generated;
mod loader;

pub use generated::*;
pub use loader::{load, Error as LoadError, BUILT_WITH, SONAME};

/// What this crate declares, as data, from which `tests/abi.rs` generates C to be checked by a C compiler.
#[doc(hidden)]
pub mod meta {
    pub use crate::declare::{Field, Function, Layout};

    pub use crate::generated::{CONSTANTS, FUNCTIONS, LAYOUTS};

    /// Whether the function of that name was called; known only with the feature `record-calls`.
    #[cfg(feature = "record-calls")]
    pub fn was_called(name: &str) -> bool {
        crate::declare::CALLED.lock().is_ok_and(|called| called.contains(name))
    }
}
