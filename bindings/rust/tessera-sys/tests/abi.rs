//! The declarations of this crate against the C headers, judged by a C compiler: every constant's value, every struct's
//! size, alignment, field offsets and types, every function's prototype; and nothing in the headers is left out.

use std::collections::{BTreeMap, BTreeSet};
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
    for (name, value) in meta::constants() {
        writeln!(c, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
    for layout in meta::layouts() {
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
    for function in meta::functions() {
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

#[test]
fn nothing_of_the_headers_is_left_out() {
    let mut functions = BTreeSet::new();
    let mut constants = BTreeSet::new();
    let mut structs = BTreeMap::new();
    for entry in std::fs::read_dir(repository().join("capi/include/tessera")).unwrap() {
        let text = without_comments(&std::fs::read_to_string(entry.unwrap().path()).unwrap());
        for piece in text.split("\nTSR_API").skip(1) {
            let end = piece.find('(').unwrap_or(0);
            // `TSR_API TSR_MUST_USE tsr_status name(` and `TSR_API const char *name(`
            functions
                .extend(piece[..end].split_whitespace().last().map(|name| name.trim_start_matches('*').to_owned()));
        }
        for body in text.split("enum {").skip(1) {
            let end = body.find('}').expect("a closed enum");
            constants
                .extend(body[..end].split(',').filter_map(|item| item.split('=').next()).map(|s| s.trim().to_owned()));
        }
        for line in text.lines().filter_map(|line| line.strip_prefix("#define TSR_")) {
            let mut words = line.split_whitespace();
            let (name, value) = (words.next().unwrap(), words.next());
            if value.is_some_and(|value| value.parse::<i64>().is_ok()) {
                constants.insert(format!("TSR_{name}"));
            }
        }
        for piece in text
            .split("typedef struct ")
            .skip(1)
            .filter(|piece| piece.find('{').is_some_and(|brace| Some(brace) < piece.find(';')))
        {
            let (name, body) = piece.split_once('{').expect("a body");
            let body = &body[..body.find('}').expect("a closed struct")];
            structs.insert(name.trim().to_owned(), body.split(';').filter_map(field_name).collect::<Vec<_>>());
        }
    }
    constants.remove("");
    let own = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(functions, own(meta::functions().iter().map(|f| f.name).collect()));
    assert_eq!(constants, own(meta::constants().iter().map(|c| c.0).collect()));
    let fields = |layout: &meta::Layout| layout.fields.iter().map(|field| field.name.to_owned()).collect::<Vec<_>>();
    assert_eq!(structs, meta::layouts().iter().map(|l| (l.name.to_owned(), fields(l))).collect::<BTreeMap<_, _>>());
    let symbols = std::fs::read_to_string(repository().join("capi/abi/symbols.txt")).unwrap();
    assert_eq!(functions, own(symbols.lines().collect()));
}

fn without_comments(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("/*") {
        kept.push_str(&rest[..start]);
        let end = rest[start..].find("*/").map_or(rest.len(), |end| start + end + 2);
        rest = &rest[end..];
    }
    kept + rest
}

/// `int64_t sizes[8]` gives `sizes`.
fn field_name(declaration: &str) -> Option<String> {
    let declaration = declaration.split('[').next()?.trim();
    declaration.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next().filter(|s| !s.is_empty()).map(str::to_owned)
}
