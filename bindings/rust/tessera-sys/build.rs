//! Finds libtessera and stores its absolute path in the crate. It looks, in this order, at:
//!
//! 1. `TESSERA_PREFIX`: an installed prefix (`lib/libtessera.so`), or a build folder (`libtessera.so`);
//! 2. `pkg-config tessera`;
//! 3. the repository this crate lies in: its `build/prefix`, into which `./dev build` installs; else CMake builds the
//!    library into `OUT_DIR`.
//!
//! Nothing is linked: the library is opened at run time (see `src/loader.rs` for why). Crates that depend on this one
//! directly get `DEP_TESSERA_LIBRARY` and, where known, `DEP_TESSERA_INCLUDE` in their own build scripts.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const SONAME: &str = "libtessera.so.0.1";
const ADVICE: &str = "Set TESSERA_PREFIX to where Tessera is installed; in its repository, run `./dev build` and \
                      eval \"$(./dev env)\".";

fn main() {
    for variable in ["TESSERA_PREFIX", "PKG_CONFIG_PATH", "DOCS_RS"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=TESSERA_SONAME={SONAME}");
    let (library, include) = if env::var_os("DOCS_RS").is_some() { (None, None) } else { find() };
    let text = |path: &Option<PathBuf>| path.as_ref().map_or(String::new(), |p| p.display().to_string());
    println!("cargo:rustc-env=TESSERA_BUILT_WITH={}", text(&library));
    println!("cargo:library={}", text(&library));
    println!("cargo:include={}", text(&include));
}

fn find() -> (Option<PathBuf>, Option<PathBuf>) {
    if let Some(prefix) = env::var_os("TESSERA_PREFIX") {
        let prefix = PathBuf::from(prefix);
        return match library_in(&prefix) {
            Some(library) => (Some(library), Some(prefix.join("include")).filter(|path| path.exists())),
            None => {
                fail(&format!("TESSERA_PREFIX is {}, but neither it nor its lib/ holds {SONAME}", prefix.display()))
            }
        };
    }
    let range = "0.1.0".."0.2.0";
    if let Ok(found) =
        pkg_config::Config::new().range_version(range).cargo_metadata(false).env_metadata(false).probe("tessera")
    {
        let library = found.link_paths.iter().find_map(|path| library_in(path));
        if library.is_some() {
            return (library, found.include_paths.first().cloned());
        }
    }
    let repository = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../..");
    if !repository.join("capi/include/tessera/tessera.h").exists() {
        // A crate outside the repository compiles without the library, which is looked up again at run time.
        println!("cargo:warning=libtessera was not found (TESSERA_PREFIX, pkg-config); it must be found at run time");
        return (None, None);
    }
    let repository = repository.canonicalize().unwrap_or(repository);
    let installed = repository.join("build/prefix");
    println!("cargo:rerun-if-changed={}", installed.join("lib").join(SONAME).display());
    if let Some(library) = library_in(&installed) {
        return (Some(library), Some(installed.join("include")));
    }
    let cmake = env::var_os("CMAKE").unwrap_or_else(|| "cmake".into());
    if let Err(error) = Command::new(&cmake).arg("--version").output() {
        fail(&format!(
            "libtessera was not found, and {} cannot be run to build it: {error}. {ADVICE}",
            cmake.to_string_lossy()
        ));
    }
    for part in ["CMakeLists.txt", "src", "capi"] {
        println!("cargo:rerun-if-changed={}", repository.join(part).display());
    }
    let mut config = cmake::Config::new(&repository);
    config.profile("Release").define("CMAKE_INSTALL_LIBDIR", "lib");
    for part in ["CLI", "TESTS", "EXAMPLES", "BENCHMARKS"] {
        config.define(format!("TESSERA_BUILD_{part}"), "OFF");
    }
    // The crate cmake reports a failure by a panic; the last line tells the user what to do.
    std::panic::set_hook(Box::new(|_| {}));
    let Ok(prefix) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| config.build())) else {
        fail(&format!("CMake could not build {}. {ADVICE}", repository.display()));
    };
    match library_in(&prefix) {
        Some(library) => (Some(library), Some(prefix.join("include"))),
        None => fail(&format!("CMake built {}, but {SONAME} is not in it", repository.display())),
    }
}

fn library_in(folder: &Path) -> Option<PathBuf> {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    ["", "lib", "lib64", &format!("lib/{arch}-linux-gnu")]
        .iter()
        .map(|sub| folder.join(sub).join(SONAME))
        .find(|path| path.is_file())
        .and_then(|path| path.parent().and_then(|folder| folder.canonicalize().ok()).map(|f| f.join(SONAME)))
}

fn fail(message: &str) -> ! {
    println!("cargo:warning={message}");
    eprintln!("{message}");
    std::process::exit(1);
}
