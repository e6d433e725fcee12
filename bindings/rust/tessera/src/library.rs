//! Finds and loads libtessera, once, on the first call into this crate.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{env, fs};

use tessera_sys as sys;

use crate::error::{Code, Error, Result};

/// Loads the library if it is not loaded yet. Every constructor of this crate calls it, so a program need not; call it
/// to find out early, and in one place, whether the library can be used.
///
/// The library is searched in this order, and the first one found is used:
///
/// 1. the file that `TESSERA_LIBRARY` names, and then nothing else;
/// 2. `libtessera.so.0.1` beside the running program, or in `../lib` from there: what is shipped with a program wins;
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
    static OUTCOME: Mutex<Option<Result<()>>> = Mutex::new(None);
    let mut outcome = OUTCOME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    outcome.get_or_insert_with(find_and_load).clone()
}

fn find_and_load() -> Result<()> {
    let explicit = env::var_os("TESSERA_LIBRARY").filter(|value| !value.is_empty());
    let mut refusals = Vec::new();
    for path in explicit.clone().map_or_else(candidates, |path| vec![PathBuf::from(path)]) {
        // SAFETY: these are the places where libtessera is installed, or what the user named.
        match unsafe { sys::load(&path) } {
            Ok(()) => return Ok(()),
            // A library that is there but does not fit is an error, not a reason to take another one in silence.
            Err(error @ (sys::LoadError::Version { .. } | sys::LoadError::Symbols { .. })) => {
                return Err(Error::new(Code::Version, error.to_string()));
            }
            Err(error) => refusals.push(error.to_string()),
        }
    }
    let advice = match explicit {
        Some(_) => "TESSERA_LIBRARY selects this file; correct or unset it",
        None => "set TESSERA_LIBRARY to the file, put it beside the program, or install libtessera",
    };
    Err(Error::new(Code::NotFound, format!("libtessera was not found: {}; {advice}", refusals.join("; "))))
}

fn candidates() -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let program = env::current_exe().and_then(fs::canonicalize);
    if let Some(folder) = program.ok().as_deref().and_then(Path::parent) {
        paths.push(folder.join(sys::SONAME));
        paths.push(folder.join("../lib").join(sys::SONAME));
    }
    if !sys::BUILT_WITH.is_empty() {
        paths.push(PathBuf::from(sys::BUILT_WITH));
    }
    paths.retain(|path| path.is_file());
    paths.push(PathBuf::from(sys::SONAME));
    paths
}

/// The version of the loaded library, `"0.1.0"`.
///
/// # Errors
/// Those of [`load`].
pub fn version() -> Result<String> {
    load()?;
    // SAFETY: the library is loaded; the string is static.
    Ok(unsafe { crate::raw::text(sys::tsr_version()) })
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
    Ok(PathBuf::from(unsafe { crate::raw::text(sys::tsr_library_path()) }))
}

/// The ABI number that these bindings need.
pub const ABI_VERSION: u32 = sys::TSR_ABI_VERSION;
