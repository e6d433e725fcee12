//! The declarations of this crate against the C headers, judged by a C compiler: every constant's value, every struct's
//! size, alignment, field offsets and types, every function's prototype. They are generated (`./dev gen`).

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use tessera_sys::meta;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// The C spelling of a type that `stringify!` wrote.
fn c_type(rust: &str) -> String {
    if let Some(inner) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(inner));
    }
    if let Some(inner) = rust.strip_prefix("*const ") {
        // `const` belongs to what is pointed at: to the pointer itself if that is one.
        let inner = c_type(inner);
        return if inner.ends_with('*') { format!("{inner} const *") } else { format!("const {inner} *") };
    }
    match rust {
        "()" | "c_void" => "void",
        "c_char" => "char",
        "i32" => "int32_t",
        "i64" => "int64_t",
        "u8" => "uint8_t",
        "u16" => "uint16_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "f64" => "double",
        name if name.starts_with("tsr_") => name,
        other => panic!("no C spelling for `{other}`"),
    }
    .to_owned()
}

fn generated() -> String {
    let mut c = String::from("#include <tessera/tessera.h>\n");
    for (name, value) in meta::CONSTANTS {
        writeln!(c, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
    for layout in meta::LAYOUTS {
        let name = layout.name;
        writeln!(c, "_Static_assert(sizeof({name}) == {}, \"size of {name}\");", layout.size).unwrap();
        writeln!(c, "_Static_assert(_Alignof({name}) == {}, \"alignment of {name}\");", layout.align).unwrap();
        for field in layout.fields {
            let (base, length) = match field.type_name.strip_prefix('[') {
                Some(array) => {
                    let (base, length) = array.trim_end_matches(']').split_once(';').expect("an array type");
                    (base.trim(), format!("[{}]", length.trim()))
                }
                None => (field.type_name, String::new()),
            };
            let of = format!("{name}.{}", field.name);
            writeln!(c, "_Static_assert(offsetof({name}, {}) == {}, \"offset of {of}\");", field.name, field.offset)
                .unwrap();
            let expected = format!("{}{length}", c_type(base));
            writeln!(
                c,
                "_Static_assert(__builtin_types_compatible_p(__typeof__((({name} *)0)->{}), {expected}), \"type of {of}\");",
                field.name
            )
            .unwrap();
        }
    }
    for function in meta::FUNCTIONS {
        // Declared a second time: the compiler refuses a prototype that differs from the header's.
        let arguments: Vec<_> = function.arguments.iter().map(|argument| c_type(argument)).collect();
        let arguments = if arguments.is_empty() { "void".to_owned() } else { arguments.join(", ") };
        writeln!(c, "{} {}({arguments});", c_type(function.result), function.name).unwrap();
    }
    c
}

fn compile(source: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("abi.c");
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let output = Command::new(compiler)
        .args(["-std=c11", "-Wall", "-Werror", "-fsyntax-only", "-I"])
        .arg(repository().join("capi/include"))
        .arg(&file)
        .output()
        .expect("a C compiler");
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[test]
fn a_c_compiler_agrees_with_every_declaration() {
    if let Err(complaints) = compile(&generated()) {
        panic!("{complaints}");
    }
}

#[test]
fn the_comparison_finds_a_wrong_value_layout_and_prototype() {
    let good = generated();
    for (right, wrong) in [
        ("TSR_E_TIMEOUT == 3", "TSR_E_TIMEOUT == 4"),
        ("offsetof(tsr_tensor, ndim) == 24", "offsetof(tsr_tensor, ndim) == 28"),
        ("tsr_status tsr_comm_rank(const tsr_comm *, int32_t *)", "tsr_status tsr_comm_rank(tsr_comm *, int32_t *)"),
        (
            "tsr_status tsr_store_add(const tsr_store *, const char *, int64_t",
            "tsr_status tsr_store_add(const tsr_store *, const char *, int32_t",
        ),
    ] {
        assert!(good.contains(right), "{right}");
        assert!(compile(&good.replace(right, wrong)).is_err(), "{wrong} was taken");
    }
}
