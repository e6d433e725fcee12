//! Declarations of Tessera's C API, generated from its headers: names and signatures as there. The headers are the
//! reference: what each function does, what it borrows and what it returns is said there alone.
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

/// What this crate declares, as data: `tests/abi.rs` writes C from it and lets a C compiler judge.
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
