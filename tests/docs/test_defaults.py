"""Bindings hold no defaults: the library's apply. But people read of them in the bindings' documentation, so the
default of each option is told there and in the C headers, and is the one that tsr_..._options_init writes."""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
from pathlib import Path

import pytest
import tessera as ts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "abi"))

import headers  # noqa: E402

JAVA = ROOT / "bindings" / "java" / "src" / "main" / "java" / "dev" / "tessera"
RUST = ROOT / "bindings" / "rust" / "tessera" / "src"
TYPES = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "const char *": ctypes.c_char_p,
    "tsr_progress_fn": ctypes.c_void_p,
    "void *": ctypes.c_void_p,
    "const tsr_storage *": ctypes.c_void_p,
    "tsr_comm *": ctypes.c_void_p,
    "tsr_tp *": ctypes.c_void_p,
    "const tsr_tensor *": ctypes.c_void_p,
    "const tsr_pipeline_edge *": ctypes.c_void_p,
    "const char *const *": ctypes.c_void_p,
    "const tsr_name_rule *": ctypes.c_void_p,
    "tsr_load_report_fn": ctypes.c_void_p,
}

# Where each binding has the setters of an option struct: the object of Python, (file, begin of its part) of the others.
PLACES = {
    "tsr_comm_options": (ts.init, ("CommOptions.java", ""), ("comm/options.rs", "impl CommOptions")),
    "tsr_ddp_options": (ts.DDP, ("DdpOptions.java", ""), ("ddp.rs", "impl DdpOptions")),
    "tsr_fsdp_options": (ts.FSDP, ("FsdpOptions.java", ""), ("fsdp.rs", "impl FsdpOptions")),
    "tsr_tp_options": (ts.TensorParallel, ("TpOptions.java", ""), ("tp/mod.rs", "impl<'c, 'l> TensorParallelBuilder")),
    "tsr_cross_entropy_options": (
        ts.TensorParallel.cross_entropy,
        ("CrossEntropyOptions.java", ""),
        ("tp/vocabulary.rs", "impl<'a> CrossEntropy<'a>"),
    ),
    "tsr_pipeline_options": (ts.Pipeline, ("Pipeline.java", "class Builder"), ("pipeline.rs", "impl")),
    "tsr_grad_scaler_options": (
        ts.GradScaler,
        ("GradScaler.java", "class Builder"),
        ("grad_scaler.rs", "impl GradScalerBuilder"),
    ),
    "tsr_loss_scale_options": (
        ts.engine.LossScale,
        ("LossScale.java", "class Builder"),
        ("loss_scale.rs", "impl LossScaleBuilder"),
    ),
    "tsr_lr_warmup_options": (
        ts.LRSchedule.warmup,
        ("LrSchedule.java", "class Warmup "),
        ("lr_schedule.rs", "    LrWarmupBuilder, "),
    ),
    "tsr_lr_warmup_cosine_options": (
        ts.LRSchedule.warmup_cosine,
        ("LrSchedule.java", "class WarmupCosine "),
        ("lr_schedule.rs", "    LrWarmupCosineBuilder, "),
    ),
    "tsr_lr_one_cycle_options": (
        ts.LRSchedule.one_cycle,
        ("LrSchedule.java", "class OneCycle "),
        ("lr_schedule.rs", "    LrOneCycleBuilder, "),
    ),
    "tsr_load_options": (ts.Checkpoint.load, ("LoadOptions.java", ""), ("checkpoint.rs", "impl<'a> LoadOptions")),
    "tsr_open_options": (ts.Checkpoint, ("Checkpoint.java", ""), ("checkpoint.rs", "impl Checkpoint {")),
    "tsr_export_options": (ts.Checkpoint.export, ("ExportOptions.java", ""), ("checkpoint.rs", "impl ExportOptions")),
    "tsr_sampler_options": (ts.Sampler, ("Sampler.java", "class Builder"), ("data.rs", "impl SamplerBuilder")),
    "tsr_metric_options": (ts.Metric, ("Metric.java", "class Builder"), ("metrics.rs", "impl MetricBuilder")),
    "tsr_saver_options": (ts.Saver, ("Saver.java", "class Builder"), ("saver.rs", "impl SaverBuilder")),
    "tsr_sgd_options": (ts.SGD, ("Optimizer.java", "class Sgd"), ("optim.rs", "Sgd, ")),
    "tsr_adam_options": (ts.Adam, ("Optimizer.java", "class Adam"), ("optim.rs", "Adam, ")),
    "tsr_adamw_options": (ts.AdamW, ("Optimizer.java", "class Adam"), ("optim.rs", "AdamW, ")),
    "tsr_store_options": (ts.StoreServer, ("StoreOptions.java", ""), ("store.rs", "impl StoreOptions")),
}
# What a binding sets itself, or tells in a setter of another name.
SET_BY_THE_BINDING = {
    ("python", "tsr_saver_options", "writer"),
    ("python", "tsr_saver_options", "writer_version"),
    ("java", "tsr_saver_options", "writer"),
    ("java", "tsr_saver_options", "writer_version"),  # the version of the JVM
    ("rust", "tsr_saver_options", "writer"),
    ("rust", "tsr_saver_options", "writer_version"),
    ("rust", "tsr_load_options", "progress"),  # an argument of load_with_progress
    ("java", "tsr_open_options", "storage"),  # an argument of open
    ("rust", "tsr_open_options", "storage"),  # of open_in
    ("rust", "tsr_export_options", "progress"),  # an argument of export_with_progress
    ("rust", "tsr_ddp_options", "tp"),  # Ddp::over_slices
    # Lists of the others know their length; Java and Rust add one edge at a time.
    *((language, "tsr_pipeline_options", "edge_count") for language in ("python", "java", "rust")),
    *((language, "tsr_pipeline_options", "edges") for language in ("java", "rust")),
    ("rust", "tsr_fsdp_options", "tp"),
    # What a callback of C gets; those of the others hold their own.
    *(
        (language, struct, "progress_data")
        for language in ("c", "python", "java", "rust")
        for struct in ("tsr_saver_options", "tsr_load_options", "tsr_export_options")
    ),
    # Lists of the others know their length, and their loads return the report.
    *(
        (language, "tsr_load_options", field)
        for language in ("python", "java", "rust")
        for field in ("only_count", "rule_count", "report", "report_data")
    ),
}
JAVA_NAMES = {
    "rules": "rename",
    "timeout_ms": "timeout",
    "heartbeat_timeout_ms": "heartbeatTimeout",
    "beta1": "betas",
    "beta2": "betas",
    "write_bytes_per_s": "writeBytesPerSecond",
}
PYTHON_NAMES = {
    "rules": "rename",
    "timeout_ms": "timeout",
    "heartbeat_timeout_ms": "heartbeat_timeout",
    "beta1": "betas",
    "beta2": "betas",
}
RUST_NAMES = {"rules": "rename", "timeout_ms": "timeout", "heartbeat_timeout_ms": "heartbeat_timeout"}


def fields(struct: str) -> dict[str, tuple[str, str]]:
    """Type and comment of each field of an option struct but its size."""
    api = headers.read()
    (found,) = (each for each in api.structs if each.name == struct)
    return {each.name: (api.plain(each.type), each.doc) for each in found.fields if each.name != "struct_size"}


def real_defaults(struct: str) -> dict[str, object]:
    """What the library writes."""
    kinds = {name: TYPES[kind] for name, (kind, _) in fields(struct).items()}
    record = type(struct, (ctypes.Structure,), {"_fields_": [("struct_size", ctypes.c_size_t), *kinds.items()]})
    library = ctypes.CDLL(str(ROOT / "build" / "prefix" / "lib" / "libtessera.so"))
    options = record()
    status = getattr(library, f"{struct}_init")(ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(options)))
    assert status == 0
    return {name: getattr(options, name) for name in kinds}


def wanted(struct: str, field: str) -> list[str]:
    """The ways to write the default of a field; empty if the header tells of it in words alone."""
    kind, comment = fields(struct)[field]
    value = real_defaults(struct)[field]
    if kind == "const char *":
        assert value is None, "a text has no default but NULL: the bindings cannot own it"
        words = re.search(r'NULL \(default\)(?: or|:)(?: \w+ or)? ("[^"]*")', comment)
        return [words[1], "NULL", "null", "none", "None"] if words else []
    if value is None:
        return []
    if field == "when_busy":
        assert value == 0
        return ["TSR_BUSY_WAIT", '"wait"', "WAIT", "Wait"]
    choices = {"task": "binary", "average": "macro", "normalize": "none"}
    if word := choices.get(field):
        return [f"TSR_{field.upper()}_{word.upper()}", f'"{word}"', word.upper(), word.capitalize()]
    if field == "schedule":
        assert value == 1
        return ["TSR_SCHEDULE_1F1B", '"1f1b"', "ONE_F_ONE_B", "OneFOneB"]
    if field == "reduction":
        assert value == 1
        return ["TSR_LOSS_MEAN", '"mean"', "MEAN", "Mean"]
    if field == "warmup_type":
        assert value == 0
        return ["TSR_LR_WARMUP_LOG", '"log"', "LOG", "Log"]
    if field in ("total_num_steps", "cycle_max_lr") and "required" in comment:
        assert value == 0
        return []
    if field == "op":
        assert value == 2
        return ["TSR_REDUCE_AVG", '"avg"', "AVG", "Avg"]
    if field == "hook":
        assert value == 0
        return ["TSR_DDP_HOOK_ALL_REDUCE", '"all_reduce"', "ALL_REDUCE", "AllReduce"]
    if field == "join":
        assert value == 0
        return ["TSR_DDP_JOIN_OFF", '"off"', "OFF", "Off"]
    if field in ("param_dtype", "reduce_dtype"):
        assert value == 0
        return ["0", "None", "none"]
    if field.endswith("_bytes") and value:
        assert isinstance(value, int)
        assert value % (1 << 20) == 0
        return [f"{value >> 20} MiB", *([f"{value >> 30} GiB"] if value % (1 << 30) == 0 else [])]
    if field.endswith("_ms"):
        assert isinstance(value, int)
        assert value % 1000 == 0
        return [str(value), f"{value // 1000} s", str(value // 1000)]
    if isinstance(value, float):
        return [{1e-8: "1e-8"}.get(value, f"{value:g}")]
    return [str(value), *{0: ["false", "False"], 1: ["true", "True"]}.get(int(str(value)), [])]


def tells(text: str, values: list[str]) -> bool:
    text = " ".join(re.sub(r"^\s*(?:\*|///)", "", text, flags=re.M).split())
    any_of = "|".join(re.escape(value) for value in values)
    another = r"(?:[\d.]+(?:,| and) |(?:the environment's )?TESSERA_\w+,? or )?"
    after = rf"\bdefaults?(?: is| are|,)? [`(]*{another}(?:{any_of})(?![\w.]*\w)"
    return re.search(after, text) is not None or re.search(rf"(?:{any_of})`? \(default\)", text) is not None


def java_setters(struct: str) -> dict[str, str]:
    """Those by hand, and those of `./dev gen`."""
    file, begin = PLACES[struct][1]
    text = (JAVA / file).read_text(encoding="utf-8")
    text = text[text.index(begin) :]
    following = text.find(" static final class ", 1)
    text = text[: following if begin and following > 0 else None]
    camel = "".join(part.capitalize() for part in struct.removeprefix("tsr_").replace("adamw", "adam").split("_"))
    generated = JAVA / f"{camel}Fields.java"
    if generated.exists():
        text += generated.read_text(encoding="utf-8")
    found = re.findall(r"/\*\*((?:(?!\*/).)*)\*/\s+(?:@Override\s+)?public \w+ (\w+)\(", text, re.S)
    return {name: doc for doc, name in reversed(found) if "@param" in doc}  # or it is a getter of that name


def rust_setters(struct: str) -> dict[str, str]:
    """Those by hand, and those of `./dev gen`."""
    file, begin = PLACES[struct][2]
    text = (RUST / file).read_text(encoding="utf-8")
    part = text[text.index(begin) :]
    part = part[: part.index("\n}")]
    setter = r" +pub (?:unsafe )?fn (\w+)(?:<[^(]*>)?\("
    found = {name: doc for doc, name in re.findall(rf"((?:^ +///.*\n)+)(?: +#.*\n)*{setter}", part, re.M)}
    found |= dict(re.findall(r'(\w+): (?:\w+ =\s+)?"([^"]*)"', part))
    settings = (RUST / "settings.rs").read_text(encoding="utf-8")
    _, _, generated = settings.partition(f"macro_rules! {struct.removeprefix('tsr_').removesuffix('_options')}_setters")
    generated = generated.partition("\n}")[0]
    docs = re.findall(rf'#\[doc = "((?:[^"\\]|\\.)*)"\]\n(?: +#.*\n)*{setter}', generated)
    return found | {name: doc.replace("\\", "") for doc, name in docs}


def python_parameters(struct: str) -> dict[str, str]:
    doc = inspect.getdoc(PLACES[struct][0])
    assert doc is not None
    part = doc.split("Parameters\n----------\n")[1].split("\n\n")[0]
    entries = re.findall(r"^(\S.*) : (.*(?:\n .*)*)", part, re.M)
    return {name: text for names, text in entries for name in names.split(", ")}


def doc_of(language: str, struct: str, field: str) -> str:
    if language == "c":
        return fields(struct)[field][1]
    if language == "python":
        setters, name = python_parameters(struct), PYTHON_NAMES.get(field, field)
    elif language == "java":
        camel = re.sub(r"_(\w)", lambda match: match[1].upper(), field)
        setters, name = java_setters(struct), JAVA_NAMES.get(field, camel)
    else:
        setters, name = rust_setters(struct), RUST_NAMES.get(field, field)
    assert name in setters, f"{language} does not offer or document {field} of {struct}: it has {sorted(setters)}"
    return setters[name]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIMEOUT_MS", "BACKEND", "INSECURE", "JOB_ID", "EPOCH"):
        monkeypatch.delenv(f"TESSERA_{name}", raising=False)


def test_every_option_struct_is_here() -> None:
    assert set(PLACES) == {each.name for each in headers.read().structs if each.name.endswith("_options")}


@pytest.mark.parametrize("language", ["c", "python", "java", "rust"])
@pytest.mark.parametrize(
    ("struct", "field"), [(struct, field) for struct in PLACES for field in fields(struct)], ids=lambda name: str(name)
)
def test_the_default_is_told(struct: str, field: str, language: str) -> None:
    if (language, struct, field) in SET_BY_THE_BINDING:
        return
    text, values = doc_of(language, struct, field), wanted(struct, field)
    assert not values or tells(text, values), f"{text!r} does not say that the default is {values[-1]}"


@pytest.mark.parametrize(
    ("text", "told"), [("default 0.01", False), ("the default is 0", True), ("defaults to 10", False)]
)
def test_another_number_is_seen(text: str, told: bool) -> None:
    assert tells(text, ["0"]) is told
