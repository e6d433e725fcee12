//! Which library is loaded, and what is said of one that does not fit. In a process of its own: a library that was loaded
//! stays.

use std::path::{Path, PathBuf};
use std::process::Command;

use tessera::{Code, Comm};
use tessera_sys::LoadError;

/// Compiles a library out of C, as `name` in `folder`.
fn library(folder: &Path, name: &str, source: &str) -> PathBuf {
    let (file, path) = (folder.join("fake.c"), folder.join(name));
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(compiler).args(["-shared", "-fPIC", "-o"]).arg(&path).arg(&file).status().unwrap();
    assert!(status.success());
    path
}

const NEWER: &str = r#"
    unsigned tsr_abi_version(void) { return 7; }
    const char *tsr_version(void) { return "0.7.3"; }
    const char *tsr_library_path(void) { return ""; }
"#;

#[test]
fn a_library_of_another_version_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = library(folder.path(), "libtessera.so.0.7", NEWER);
    std::env::set_var("TESSERA_LIBRARY", &path);
    let error = tessera::load().unwrap_err();
    assert_eq!(error.code(), Code::Version);
    for part in [&*path.display().to_string(), "0.7.3", "ABI 7", "0.1.0", "ABI 1"] {
        assert!(error.message().contains(part), "{part} is missing in: {error}");
    }
    // Every way in says the same, and none crashes.
    assert_eq!(Comm::from_env().unwrap_err().message(), error.message());
    assert_eq!(tessera::Checkpoint::open("x").unwrap_err().code(), Code::Version);
    assert_eq!(tessera::Saver::alone("x").open().unwrap_err().code(), Code::Version);
    assert_eq!(tessera::Layout::new(&[1], &[1], &[tessera::Placement::Replicate]).unwrap_err().code(), Code::Version);
    assert_eq!(tessera::State::new().set("x", 1i64).unwrap_err().code(), Code::Version);
    let mut model = tessera::Local::new(tessera::params!["w" => (vec![1.0f32], [1])]).unwrap();
    assert_eq!(tessera::Sgd::new(&mut model).build().unwrap_err().code(), Code::Version);
    assert_eq!(tessera::set_log_level(None).unwrap_err().code(), Code::Version);
    assert_eq!(tessera::record_error("x", None).unwrap_err().code(), Code::Version);
    assert!(!tessera::preempt_requested() && tessera::Error::last().is_none());
    assert_eq!(tessera::with_interrupt(|| true, || 5), 5);
    assert!(format!("{error:?}").contains("0.7.3"), "printing needs no library");
}

#[test]
fn a_library_that_lacks_functions_is_refused_with_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = library(folder.path(), "libtessera.so.0.1", &NEWER.replace("return 7", "return 1"));
    // SAFETY: it does nothing when it is loaded.
    match unsafe { tessera_sys::load(&path) }.unwrap_err() {
        LoadError::Symbols { missing, .. } => assert!(missing.contains(&"tsr_comm_all_reduce")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn other_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "no library").unwrap();
    for path in [&text, &folder.path().join("absent.so")] {
        // SAFETY: these are no libraries.
        let error = unsafe { tessera_sys::load(path) }.unwrap_err();
        assert!(matches!(error, LoadError::Open { .. }), "{error:?}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
    let other = library(folder.path(), "libother.so", "int other(void) { return 1; }");
    // SAFETY: as above.
    let error = unsafe { tessera_sys::load(&other) }.unwrap_err();
    assert!(matches!(error, LoadError::Version { found: None, .. }), "{error:?}");
}

#[test]
#[should_panic(expected = "tsr_version was called before tessera_sys::load succeeded")]
fn the_raw_functions_say_that_nothing_is_loaded() {
    // SAFETY: it panics before it calls anything.
    unsafe { tessera_sys::tsr_version() };
}
