"""What users read: each public name has a docstring and a line in the README's index."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import tessera as ts

README = (Path(__file__).parents[1] / "README.md").read_text()
INDEX = README.split("## All public names")[1].split("\n## ")[0]


def members(owner: type) -> dict[str, object]:
    """The public members that a class of this package brings or inherits."""
    found: dict[str, object] = {}
    for cls in reversed(owner.__mro__):
        if cls.__module__.startswith("tessera"):
            found |= {name: member for name, member in vars(cls).items() if not name.startswith("_")}
    return found


@pytest.mark.parametrize("name", ts.__all__)
def test_a_public_name_is_described(name: str):
    thing = getattr(ts, name)
    if name == "ReduceOp":  # an alias of Literal, which has no place for a docstring
        return
    assert inspect.getdoc(thing), name
    if not inspect.isclass(thing):
        return
    own = thing.__doc__
    assert own, f"{name} only has its parent's docstring"
    for member_name, member in members(thing).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if callable(function):
            assert inspect.getdoc(function), f"{name}.{member_name}"


@pytest.mark.parametrize("module", [ts.engine, ts.log, ts.random], ids=["engine", "log", "random"])
def test_the_functions_of_a_module_are_described(module: ModuleType):
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name


def test_the_index_names_everything_once_and_nothing_else():
    named = re.findall(r"^- `(?:ts\.)?(\w+(?:\.\w+)?)", INDEX, re.MULTILINE)
    assert sorted(named) == sorted(set(named))
    expected = [name for name in ts.__all__ if name not in ("engine", "log", "random", "storage")]
    expected += [f"engine.{name}" for name in ts.engine.__all__ if name != "Engine"]
    expected += [f"log.{name}" for name in ts.log.__all__]
    expected += [f"random.{name}" for name in ts.random.__all__]
    expected += [f"storage.{name}" for name in ts.storage.__all__ if name != "Storage"]
    assert sorted(named) == sorted(expected)


@pytest.mark.parametrize("line", re.findall(r"^- .*(?:\n  .*)*", INDEX, re.MULTILINE))
def test_a_line_of_the_index_says_what_the_name_is(line: str):
    assert re.match(r"- `[^`]+`: .{8,}", line), line
    owner = re.match(r"- `(?:ts\.)?(?:engine\.)?(\w+)", line)
    assert owner
    for method in re.findall(r"`\.(\w+)`", line):
        assert hasattr(getattr(ts, owner[1], None) or getattr(ts.engine, owner[1]), method), f"{owner[1]}.{method}"


def test_signatures_can_be_read():
    for name in ("DDP", "SGD", "Adam", "AdamW", "Comm", "Saver", "State", "init"):
        thing = getattr(ts, name)
        assert inspect.signature(thing)
    assert list(inspect.signature(ts.AdamW).parameters) == ["params", "grads", "lr", "betas", "eps", "weight_decay"]
    assert list(inspect.signature(ts.Comm.all_reduce).parameters) == ["self", "tensors", "op", "async_op", "dtype"]
