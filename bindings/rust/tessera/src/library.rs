//! Loads libtessera on the first call into this crate, and reports which one that is.

use std::path::PathBuf;

use tessera_sys as sys;

use crate::error::{Code, Error, Result};
use crate::loader::{self, Refusal};
use crate::text::text;

/// Loads the library if it is not loaded yet. Every constructor of this crate calls it, so a program need not; call it
/// to find out early, and in one place, whether the library can be used.
///
/// The library is searched in this order, and the first one found is used:
///
/// 1. the file that `TESSERA_LIBRARY` names, and then nothing else;
/// 2. `libtessera.so.0.1` next to the running program, or in `../lib` from there: what is shipped with a program wins;
/// 3. the library that `tessera-sys` was built with (`TESSERA_PREFIX`, pkg-config, or CMake from the repository);
/// 4. what the system's loader finds by name.
///
/// It is opened, not linked: an rpath that a dependency's build script sets does not reach the final binary, and a linked
/// library of another version would end the process before `main`. So no program needs `LD_LIBRARY_PATH`, and a wrong
/// library is an error like any other.
///
/// # Errors
/// [`Code::Version`]: the library has another ABI than these bindings, or lacks functions; the message names both
/// versions and the file. [`Code::NotFound`]: no library was found.
pub fn load() -> Result<()> {
    loader::load().map_err(|refusal| match refusal {
        Refusal::Unfit(message) => Error::new(Code::Version, message),
        Refusal::NotFound(message) => Error::new(Code::NotFound, message),
    })
}

/// The version of the loaded library, `"0.1.0"`.
///
/// # Errors
/// Those of [`load`].
pub fn version() -> Result<String> {
    load()?;
    // SAFETY: the library is loaded; the string is static.
    Ok(unsafe { text(sys::tsr_version()) })
}

/// The ABI number of the loaded library; it equals [`ABI_VERSION`].
///
/// # Errors
/// Those of [`load`].
pub fn abi_version() -> Result<u32> {
    load()?;
    // SAFETY: the library is loaded.
    Ok(unsafe { sys::tsr_abi_version() })
}

/// The file that the library was loaded from.
///
/// # Errors
/// Those of [`load`].
pub fn library_path() -> Result<PathBuf> {
    load()?;
    // SAFETY: the library is loaded; the string is static.
    Ok(PathBuf::from(unsafe { text(sys::tsr_library_path()) }))
}

/// The ABI number that these bindings need.
pub const ABI_VERSION: u32 = sys::TSR_ABI_VERSION;
