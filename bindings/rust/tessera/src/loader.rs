//! Finds libtessera and opens it, once. It knows no `Error`, which asks the library for names.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{env, fs};

use tessera_sys as sys;

/// Why there is no library.
#[derive(Clone)]
pub(crate) enum Refusal {
    /// It has another ABI, or lacks functions.
    Unfit(String),
    NotFound(String),
}

pub(crate) fn load() -> Result<(), Refusal> {
    static OUTCOME: Mutex<Option<Result<(), Refusal>>> = Mutex::new(None);
    let mut outcome = OUTCOME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    outcome.get_or_insert_with(find_and_load).clone()
}

fn find_and_load() -> Result<(), Refusal> {
    let explicit = env::var_os("TESSERA_LIBRARY").filter(|value| !value.is_empty());
    let mut refusals = Vec::new();
    for path in explicit.clone().map_or_else(candidates, |path| vec![PathBuf::from(path)]) {
        // SAFETY: these are the places where libtessera is installed, or what the user named.
        match unsafe { sys::load(&path) } {
            Ok(()) => return Ok(()),
            // A library that is there but does not fit is an error, not a reason to take another one in silence.
            Err(error @ (sys::LoadError::Version { .. } | sys::LoadError::Symbols { .. })) => {
                return Err(Refusal::Unfit(error.to_string()));
            }
            Err(error) => refusals.push(error.to_string()),
        }
    }
    let advice = match explicit {
        Some(_) => "TESSERA_LIBRARY selects this file; correct or unset it",
        None => "set TESSERA_LIBRARY to the file, put it beside the program, or install libtessera",
    };
    Err(Refusal::NotFound(format!("libtessera was not found: {}; {advice}", refusals.join("; "))))
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
