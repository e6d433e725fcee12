"""Every function of the C library has its place in the binding, and this run of the tests has called it."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from conftest import called, messages
from tessera import _core

REPOSITORY = Path(__file__).parents[3]
SOURCES = REPOSITORY / "bindings/python/native"


def exported() -> list[str]:
    """But what docs/PARITY.md argues that Python does otherwise."""
    excused = runpy.run_path(str(REPOSITORY / "tools/gen/parity.py"))["EXCUSES"]["Python"]
    return [name for name in (REPOSITORY / "capi/abi/symbols.txt").read_text().split() if name not in excused]


def bodies() -> dict[str, str]:
    """The functions of the extension's sources, each with its text."""
    text = "\n".join(path.read_text() for path in [*SOURCES.glob("*.pxi"), SOURCES / "_core.pyx"])
    parts = re.split(r"^ *(?:cdef|def) (?:[\w ]+[ *])?\*?(\w+)\(.*$", text, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        found[name] = found.get(name, "") + body
    return found


def test_every_function_has_its_place():
    text = " ".join(bodies().values())
    missing = [name for name in exported() if not re.search(rf"\b{name}\(", text)]
    assert missing == []


def test_numbers_are_read_from_a_state_by_kind(tmp_path: Path):
    """The typed modules read any value as JSON; these two are for callers of `_core`."""
    state = _core.state_create()
    _core.state_set_int64(state, "int", -3)
    _core.state_set_double(state, "double", 0.5)
    assert _core.state_get_int64(state, "int") == -3
    assert _core.state_get_double(state, "double") == 0.5
    with pytest.raises(ts.InvalidArgument, match="double"):
        _core.state_get_int64(state, "double")
    with pytest.raises(ts.NotFound, match="none"):
        _core.state_get_double(state, "none")
    _core.state_destroy(state)


def test_every_handle_can_be_destroyed_by_hand():
    with ts.init() as comm:
        ddp = ts.DDP(comm, {"w": np.ones(2)})
        work = _core.comm_barrier(comm._handle, True)
        assert work is not None
        _core.work_wait(work, -1)
        buffer = _core.buffer_create(comm._handle, 10)
        for destroy, handle in (
            (_core.work_destroy, work),
            (_core.buffer_destroy, buffer),
            (_core.ddp_destroy, ddp._handle),
        ):
            destroy(handle)
            destroy(handle)
            assert handle.closed


def test_the_launcher_is_told_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "error"
    monkeypatch.setenv("TESSERA_ERROR_FILE", str(file))

    @ts.record
    def main():
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        main()
    assert "told" in file.read_text()
    _core.record_error_about("a later one", None, int(ts.Code.TIMEOUT), 1)
    with pytest.raises(ts.InvalidArgument, match="code"):
        _core.record_error_about("of no code", None, 0, 1)


@pytest.mark.whole_run
def test_no_message_of_the_whole_run_speaks_c():
    """Every error that the tests provoke, in any module of theirs, came by here."""
    assert [
        text for text in messages.everything() if re.search(r"\btsr_|\bTSR_|struct_size|\w_ms\b|\bNULL\b|_core\b", text)
    ] == []


@pytest.mark.whole_run
def test_every_function_was_called(request: pytest.FixtureRequest):
    names = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    ran = {item.path.name for item in request.session.items}
    if names != ran or request.config.getoption("keyword"):
        pytest.skip("only a part of the tests runs")
    functions = bodies()
    called_by_all = called.everything()
    reached, queue = set(called_by_all), list(called_by_all)
    while queue:
        for name in set(re.findall(r"\w+", functions.get(queue.pop(), ""))) & functions.keys() - reached:
            reached.add(name)
            queue.append(name)
    # Handles are freed by their class, under what every function does.
    text = " ".join(functions[name] for name in reached | {"free", "release", "on_poll"} if name in functions)
    assert [name for name in exported() if not re.search(rf"\b{name}\(", text)] == []
    public = {name for name, member in vars(_core).items() if callable(member) and hasattr(member, "__wrapped__")}
    assert sorted(public - called_by_all) == []
