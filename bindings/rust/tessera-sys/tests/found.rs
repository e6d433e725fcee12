//! Where the build script looks for the library, and what it says when there is none.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The newest that cargo built, beside this test.
fn build_script() -> PathBuf {
    let test = env::current_exe().unwrap();
    let builds = test.parent().unwrap().parent().unwrap().join("build");
    fs::read_dir(&builds)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("tessera-sys-"))
        .map(|path| path.join("build-script-build"))
        .filter(|script| script.is_file())
        .max_by_key(|script| script.metadata().unwrap().modified().unwrap())
        .expect("cargo built it")
}

/// A repository that has this crate and nothing built.
fn repository(name: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&root);
    for folder in ["bindings/rust/tessera-sys", "capi/include/tessera", "out"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::write(root.join("capi/include/tessera/tessera.h"), "").unwrap();
    root
}

/// Runs the script there; pkg-config knows no library.
fn run(root: &Path, cmake: &str) -> (Output, String, String) {
    let output = Command::new(build_script())
        .env_remove("TESSERA_PREFIX")
        .env_remove("DOCS_RS")
        .env("TESSERA_NO_PKG_CONFIG", "1")
        .env("CARGO_MANIFEST_DIR", root.join("bindings/rust/tessera-sys"))
        .env("CARGO_CFG_TARGET_ARCH", env::consts::ARCH)
        .env("OUT_DIR", root.join("out"))
        .env("TARGET", "x86_64-unknown-linux-gnu")
        .env("HOST", "x86_64-unknown-linux-gnu")
        .env("PROFILE", "debug")
        .env("OPT_LEVEL", "0")
        .env("DEBUG", "false")
        .env("NUM_JOBS", "1")
        .env("CMAKE", cmake)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

#[test]
fn what_dev_build_installed_is_found_without_an_environment() {
    let root = repository("installed");
    let library = root.join("build/prefix/lib/libtessera.so.0.1");
    fs::create_dir_all(library.parent().unwrap()).unwrap();
    fs::write(&library, "").unwrap();
    let (output, out, err) = run(&root, "no-such-cmake");
    assert!(output.status.success(), "{out}{err}");
    let built_with = format!("TESSERA_BUILT_WITH={}", library.canonicalize().unwrap().display());
    assert!(out.lines().any(|line| line.ends_with(&built_with)), "{out}");
}

#[test]
fn without_cmake_a_line_says_what_to_set() {
    let (output, out, err) = run(&repository("no_cmake"), "no-such-cmake");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(err.lines().count(), 1, "{err}");
    for what in ["no-such-cmake cannot be run", "TESSERA_PREFIX", r#"eval "$(./dev env)""#] {
        assert!(err.contains(what), "{err}");
    }
    assert!(out.lines().count() < 12, "{out}");
}

#[test]
fn where_cmake_fails_the_last_line_says_what_to_set() {
    let root = repository("bad_cmake");
    let cmake = root.join("cmake");
    fs::write(&cmake, "#!/bin/sh\n[ \"$1\" = --version ] || { echo no compiler; exit 1; }\n").unwrap();
    fs::set_permissions(&cmake, fs::Permissions::from_mode(0o755)).unwrap();
    let (output, out, err) = run(&root, cmake.to_str().unwrap());
    assert_eq!(output.status.code(), Some(1));
    let last = err.lines().last().unwrap();
    assert!(last.starts_with("CMake could not build ") && last.contains("TESSERA_PREFIX"), "{err}");
    assert!(out.contains("no compiler") && !err.contains("panicked"), "{out}{err}");
}
