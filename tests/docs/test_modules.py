"""The modules of the Python and Rust bindings depend on each other in one direction."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

BINDINGS = Path(__file__).resolve().parents[2] / "bindings"
PYTHON = BINDINGS / "python/src"
RUST = BINDINGS / "rust/tessera/src"

Uses = dict[str, set[str]]


def module_of(path: Path, package_file: str) -> tuple[str, ...]:
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == package_file else parts


def of_python() -> Uses:
    """Each module with those that it imports: at its top, in a function, or for types alone."""
    paths = {".".join(module_of(path.relative_to(PYTHON), "__init__")): path for path in PYTHON.rglob("*.py*")}
    paths = {name: path for name, path in paths.items() if path.suffix in (".py", ".pyi")}
    uses: Uses = {}
    for name, path in paths.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        used = uses.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names = [f"{base}.{alias.name}" for alias in node.names]
                used.update(one if one in paths else base for one in names)
    return {name: used & paths.keys() for name, used in uses.items()}


def listed(names: str) -> list[str]:
    """The names of `{one, other as another}`, or the one that stands without braces."""
    return [name.split(" as ")[0].strip() for name in names.strip("{}").split(",") if name.strip()]


def of_rust() -> Uses:
    """Each module with those whose items it names by `crate::`. An item counts where it is defined, not where `pub use`
    shows it again. What a module takes from its parent, by `super::`, does not count."""
    files = {"::".join(module_of(path.relative_to(RUST), "mod")): path for path in RUST.rglob("*.rs")}
    code = {name: re.sub(r"//.*", "", path.read_text()) for name, path in files.items()}
    code[""] = code.pop("lib")
    shown: dict[tuple[str, str], str] = {}
    for module, text in code.items():
        for path, names in re.findall(r"^pub(?:\(crate\))? use ([\w:]+)::(\{[^}]*\}|\w+);", text, re.MULTILINE):
            origin = re.sub(r"^self\b", module, path.removeprefix("crate::"))
            shown |= {(module, name): origin for name in listed(names)}

    def home(segments: list[str]) -> str:
        module = ""
        for segment in segments:
            inner = f"{module}::{segment}" if module else segment
            if inner not in code:
                return shown.get((module, segment), module)
            module = inner
        return module

    uses: Uses = {}
    for module, text in code.items():
        uses[module] = set()
        for path, names in re.findall(r"\bcrate::((?:\w+::)*)(\{[^}]*\}|\w+)", text):
            before = path.split("::")[:-1]
            uses[module] |= {home([*before, *([] if name == "self" else [name])]) for name in listed(names)}
    return {module: used - {module} for module, used in uses.items() if module}


@pytest.mark.parametrize(
    ("read", "module", "used"),
    [(of_python, "tessera.optim", "tessera.ddp"), (of_rust, "optim", "ddp")],
    ids=["python", "rust"],
)
def test_no_modules_use_each_other_in_a_circle(read: Callable[[], Uses], module: str, used: str) -> None:
    uses = read()
    assert used in uses[module]  # the reader sees what is there
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" is used by ".join(error.args[1]))
