//! Opens libtessera, compares its ABI with that of these declarations and fills the function tables.
//!
//! Why open and not link: an rpath that a dependency's build script sets does not reach the final binary, so a linked
//! library is found by `cargo run` only, not by the same binary started by hand or by a launcher, unless every user
//! adds a build script or `LD_LIBRARY_PATH`. A library of another version would moreover be refused by the dynamic
//! linker (a missing symbol ends the process before `main`), where this loader names both versions and the file. The
//! cost is one load and one predicted branch per call.

use std::ffi::{c_void, CStr};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::{tsr_abi_version, TSR_ABI_VERSION};

/// The absolute path of the library that the build script found; empty if it found none.
pub const BUILT_WITH: &str = env!("TESSERA_BUILT_WITH");
/// The file name under which the system's loader finds the library.
pub const SONAME: &str = env!("TESSERA_SONAME");

/// Why a library could not be used.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be opened as a library.
    Open {
        /// The file.
        path: PathBuf,
        /// The system loader's message.
        reason: String,
    },
    /// The library has a different ABI than these declarations.
    Version {
        /// The file.
        path: PathBuf,
        /// The library's ABI number and version ("0.1.0"), if it reports them.
        found: Option<(u32, String)>,
    },
    /// The library has the right ABI but lacks functions.
    Symbols {
        /// The file.
        path: PathBuf,
        /// The names of all missing functions.
        missing: Vec<&'static str>,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = env!("CARGO_PKG_VERSION");
        match self {
            Error::Open { path, reason } => write!(f, "{} cannot be loaded: {reason}", path.display()),
            Error::Version { path, found: Some((abi, version)) } => write!(
                f,
                "{} is libtessera {version} with ABI {abi}, but these bindings are {own} and need ABI {TSR_ABI_VERSION}; \
                 install matching versions, or name the right file in TESSERA_LIBRARY",
                path.display()
            ),
            Error::Version { path, found: None } => write!(
                f,
                "{} has no tsr_abi_version, so it is not libtessera; these bindings are {own} and need ABI {TSR_ABI_VERSION}",
                path.display()
            ),
            Error::Symbols { path, missing } => write!(
                f,
                "{} has ABI {TSR_ABI_VERSION} but lacks {}; it is incomplete or was built from another revision",
                path.display(),
                missing.join(", ")
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Opens `path` (a file, or a bare name that the system's loader finds) and binds every function of this crate to it.
/// The first library that is bound stays loaded for the life of the process; later calls do nothing.
///
/// # Errors
/// [`Error`]; nothing is bound then, and another path may be tried.
///
/// # Safety
/// `path` is a libtessera: opening it runs its code.
pub unsafe fn load(path: &Path) -> Result<(), Error> {
    static LOADED: Mutex<bool> = Mutex::new(false);
    let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *loaded {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    let library = unsafe { libloading::Library::new(path) }
        .map_err(|error| Error::Open { path: path.into(), reason: describe(&error) })?;
    let find = |name: &str| {
        // SAFETY: only the address is read here.
        unsafe { library.get::<*mut c_void>(name.as_bytes()) }.map_or(std::ptr::null_mut(), |symbol| *symbol)
    };
    // The version first: a library of another one may well lack functions.
    let version = find("tsr_abi_version");
    if version.is_null() {
        return Err(Error::Version { path: path.into(), found: None });
    }
    // SAFETY: these three functions keep their types in every version of the library.
    let abi = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u32>(version)() };
    let text = |name: &str| match find(name) {
        symbol if symbol.is_null() => String::new(),
        // SAFETY: as above; they return static strings.
        symbol => unsafe {
            let text = std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const std::ffi::c_char>(symbol)();
            CStr::from_ptr(text).to_string_lossy().into_owned()
        },
    };
    let real = Some(text("tsr_library_path")).filter(|path| !path.is_empty()).map_or(path.into(), PathBuf::from);
    if abi != TSR_ABI_VERSION {
        return Err(Error::Version { path: real, found: Some((abi, text("tsr_version"))) });
    }
    let missing: Vec<_> =
        crate::meta::FUNCTIONS.iter().map(|function| function.name).filter(|name| find(name).is_null()).collect();
    if !missing.is_empty() {
        return Err(Error::Symbols { path: real, missing });
    }
    // SAFETY: each name is there, and of the same ABI.
    unsafe { crate::generated::bind(&find) };
    // Never unloaded: handles and threads of it may live until the process ends.
    std::mem::forget(library);
    *loaded = true;
    debug_assert_eq!(unsafe { tsr_abi_version() }, TSR_ABI_VERSION);
    Ok(())
}

fn describe(error: &libloading::Error) -> String {
    match error {
        libloading::Error::DlOpen { desc } => format!("{desc:?}").trim_matches('"').to_owned(),
        other => other.to_string(),
    }
}

#[cold]
pub(crate) fn not_loaded(name: &str) -> ! {
    panic!("{name} was called before tessera_sys::load succeeded")
}
