"""`tessera.torch.checkpoint` in one process: what is saved and how, what replaces what, planners, errors, names."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import importlib
import inspect
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import tessera as ts  # noqa: E402
import tessera.torch.checkpoint as tcp  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from conftest import TESSERA  # noqa: E402
from patience import patience  # noqa: E402
from run_torch import run_python  # noqa: E402
from tessera.torch.checkpoint import format_utils, saves  # noqa: E402
from tessera.torch.checkpoint.data import refusal  # noqa: E402
from tessera.torch.checkpoint.dcp_metadata import read_metadata  # noqa: E402
from tessera.torch.tensors import staged  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FORMATS = ["tessera", "torch_dcp"]


class Colour(enum.IntEnum):
    red = 1


def test_tessera_itself_does_without_pytorch() -> None:
    program = "import sys, tessera; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience(60))


@pytest.mark.parametrize("name", ["save", "async_save", "load", "save_state_dict", "load_state_dict"])
def test_signatures_are_pytorchs(name: str) -> None:
    ours, theirs = (list(inspect.signature(getattr(of, name)).parameters.values()) for of in (tcp, dcp))
    told = [[(one.name, one.kind, one.default) for one in of[: len(theirs)]] for of in (ours, theirs)]
    assert told[0] == told[1]
    assert [own.name for own in ours[len(theirs) :]] in ([], ["format"])


def test_storage_may_be_the_second_argument(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="argument order of save"):
        tcp.save({"x": torch.ones(2)}, tcp.FileSystemWriter(tmp_path))
    got = {"x": torch.zeros(2)}
    with pytest.warns(UserWarning, match="argument order of load"):
        tcp.load(got, tcp.FileSystemReader(tmp_path))
    assert got["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "module",
    [
        *("api", "default_planner", "filesystem", "format_utils", "fsspec_filesystem", "hf_storage", "metadata"),
        *("optimizer", "planner", "quantized_hf_storage", "staging", "state_dict", "state_dict_loader"),
        *("state_dict_saver", "stateful", "storage"),
    ],
)
def test_modules_have_pytorchs_names(module: str) -> None:
    theirs = importlib.import_module(f"torch.distributed.checkpoint.{module}")
    ours = importlib.import_module(f"tessera.torch.checkpoint.{module}")
    assert [name for name in ours.__all__ if not hasattr(theirs, name)] == []
    public = {name for name in vars(theirs) if name in dcp.__dict__ and isinstance(vars(theirs)[name], type)}
    defined = {name for name in public if vars(theirs)[name].__module__ == theirs.__name__}
    assert defined <= set(ours.__all__)
    assert [name for name in defined if getattr(tcp, name) is not getattr(ours, name)] == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("stateful", ["Stateful"]),
        ("planner", ["SavePlanner", "LoadPlanner", "SavePlan", "LoadPlan", "ReadItem", "WriteItem"]),
        ("default_planner", ["DefaultSavePlanner", "DefaultLoadPlanner"]),
        ("storage", ["StorageReader", "StorageWriter"]),
        (
            "state_dict",
            [
                *("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict", "StateDictOptions"),
                *("set_state_dict", "set_model_state_dict", "set_optimizer_state_dict"),
            ],
        ),
    ],
)
def test_what_makes_states_and_plans_is_pytorchs_own(module: str, names: list[str]) -> None:
    theirs = importlib.import_module(f"torch.distributed.checkpoint.{module}")
    ours = {name: inspect.unwrap(getattr(tcp, name)) for name in names}  # those for states choose a kind of state first
    assert [name for name, own in ours.items() if own is not getattr(theirs, name)] == []
    assert set(names) <= set(tcp.__all__)


@pytest.mark.parametrize("name", ["FileSystemWriter", "FileSystemReader"])
def test_storage_classes_begin_as_pytorchs_do(name: str) -> None:
    ours, theirs = (list(inspect.signature(getattr(of, name).__init__).parameters.values()) for of in (tcp, dcp))
    theirs = [other for other in theirs if not other.name.startswith("_") and other.name != "serialization_format"]
    begin = [(own.name, own.default) for own in ours[: len(theirs)]]
    assert begin == [(other.name, other.default) for other in theirs]


def test_how_pytorch_would_write_items_is_taken_or_refused(tmp_path: Path) -> None:
    forms = dcp.filesystem.SerializationFormat
    for form in (None, forms.TORCH_SAVE):
        tcp.save({"a": torch.ones(2)}, storage_writer=tcp.FileSystemWriter(tmp_path, serialization_format=form))
    with pytest.raises(ts.Unsupported, match="SAFETENSORS"):
        tcp.FileSystemWriter(tmp_path, serialization_format=forms.SAFETENSORS)


@pytest.mark.parametrize("form", FORMATS)
def test_the_metadata_tells_what_was_saved(tmp_path: Path, form: str) -> None:
    metadata = tcp.save({"a": {"b": torch.ones(2, 3)}, "n": [1, {"x": 2}]}, checkpoint_id=tmp_path, format=form)
    assert set(metadata.state_dict_metadata) == {"a.b", "n.0", "n.1.x"}
    assert metadata.state_dict_metadata["a.b"].size == torch.Size([2, 3])
    read = tcp.FileSystemReader(tmp_path).read_metadata()
    assert set(read.state_dict_metadata) == set(metadata.state_dict_metadata)
    assert read.planner_data == {"a.b": ("a", "b"), "n.0": ("n", 0), "n.1.x": ("n", 1, "x")}
    assert metadata.planner_data == read.planner_data


@pytest.mark.parametrize("save", [tcp.save, dcp.save])
@pytest.mark.parametrize("form", FORMATS)
def test_the_metadata_tells_which_save_it_is(tmp_path: Path, form: str, save: Any) -> None:
    writer = tcp.FileSystemWriter(tmp_path, format=form)
    ids = []
    for _ in range(2):
        told = save({"x": torch.ones(2)}, checkpoint_id=tmp_path, storage_writer=writer).storage_meta
        reader = tcp.FileSystemReader(tmp_path)
        read = reader.read_metadata().storage_meta
        assert read is not None
        assert str(told.checkpoint_id) == str(read.checkpoint_id) == str(tmp_path)
        assert told.save_id == read.save_id == writer.save_id
        assert read.load_id == reader.load_id
        if form == "torch_dcp":
            theirs = dcp.FileSystemReader(tmp_path).read_metadata().storage_meta
            assert (str(theirs.checkpoint_id), theirs.save_id) == (str(tmp_path), told.save_id)
        ids.append(read.save_id)
    assert ids[0] != ids[1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_of_an_early_python_3_11_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    """Its enums pickle by getattr, which has another module's name up to protocol 2."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.dumps(dcp.FileSystemReader(tmp_path).read_metadata(), protocol)
    assert b"getattr" in metadata
    (tmp_path / ".metadata").write_bytes(metadata)
    for load in (tcp.load, dcp.load):
        got = {"x": torch.zeros(3)}
        load(got, checkpoint_id=tmp_path, no_dist=True)
        assert got["x"].tolist() == [1, 1, 1]
    with ts.Checkpoint(tmp_path) as ours:
        assert ours["x"].tolist() == [1, 1, 1]


def test_memory_that_fits_is_not_copied() -> None:
    tensor = torch.rand(3, 4)
    assert staged(torch.nn.Parameter(tensor), "x").data_ptr() == tensor.data_ptr()
    assert staged(tensor.t(), "x").data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("form", FORMATS)
def test_tied_weights_are_saved_once(tmp_path: Path, form: str) -> None:
    tensor = torch.rand(1000, 100)
    tcp.save({"a": tensor, "b": tensor}, checkpoint_id=tmp_path, format=form)
    assert sum(file.stat().st_size for file in tmp_path.glob("step-*/*")) < tensor.nbytes * 1.5
    for load in (tcp.load, dcp.load) if form == "torch_dcp" else (tcp.load,):
        got = {"a": torch.zeros(1000, 100), "b": torch.zeros(1000, 100)}
        load(got, checkpoint_id=tmp_path)
        assert torch.equal(got["a"], tensor)
        assert torch.equal(got["b"], tensor)


@pytest.mark.parametrize("form", FORMATS)
def test_small_floats_unsigned_and_complex_come_back(tmp_path: Path, form: str) -> None:
    state = {
        "e4m3": torch.arange(4.0).to(torch.float8_e4m3fn),
        "e5m2": torch.arange(4.0).to(torch.float8_e5m2),
        "e8m0": torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e8m0fnu),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "u32": torch.tensor([1, 2**32 - 1], dtype=torch.uint32),
        "u64": torch.tensor([1, 2**63 + 1], dtype=torch.uint64),
        "c64": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
    }
    wide = {"c128": torch.tensor([[1 + 2j], [3 - 4j]], dtype=torch.complex128)}
    if form == "torch_dcp":
        state |= wide
    else:
        with pytest.raises(ts.Unsupported, match="'c128' is c128, which safetensors"):
            tcp.save(wide, checkpoint_id=tmp_path, format=form)
    tcp.save(state, checkpoint_id=tmp_path, format=form)
    for load in (tcp.load, dcp.load) if form == "torch_dcp" else (tcp.load,):
        got = {name: torch.zeros_like(value) for name, value in state.items()}
        load(got, checkpoint_id=tmp_path)
        for name, value in state.items():
            assert got[name].view(torch.uint8).tolist() == value.resolve_conj().view(torch.uint8).tolist(), name


def test_dtypes_that_the_core_lacks_come_back(tmp_path: Path) -> None:
    state = {
        "eight": torch.arange(4.0).to(torch.float8_e4m3fnuz),
        "complex": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex32),
    }
    tcp.save(state, checkpoint_id=tmp_path)
    got = {name: torch.zeros_like(value) for name, value in state.items()}
    tcp.load(got, checkpoint_id=tmp_path)
    for name, value in state.items():
        assert got[name].view(torch.uint8).tolist() == value.view(torch.uint8).tolist(), name
    with pytest.raises(ts.Unsupported, match="'eight' is float8_e4m3fnuz"):
        tcp.save({"eight": state["eight"]}, checkpoint_id=tmp_path / "theirs", format="torch_dcp")


@pytest.mark.parametrize("form", FORMATS)
def test_objects_come_back_as_what_they_were(tmp_path: Path, form: str) -> None:
    state: dict[str, Any] = {
        "size": torch.Size([2, 3]),
        "dtype": torch.float16,
        "tuple": (1, [2.5, None], "größer"),
        "big": 2**80,
        "nan": float("inf"),
        "flag": True,
        "list": [1, 2],
        "bytes": b"\x00\xff",
        "broken": "\ud800",  # no UTF-8 has it
    }
    tcp.save(state, checkpoint_id=tmp_path, format=form)
    got = dict.fromkeys(state)
    tcp.load(got, checkpoint_id=tmp_path)
    assert got == state
    assert {name: type(value) for name, value in got.items()} == {name: type(value) for name, value in state.items()}
    if form == "torch_dcp":
        got = dict.fromkeys(state)
        dcp.load(got, checkpoint_id=tmp_path)
        assert got == state


DATA = {
    "scalar": np.float64(0.5),
    "half": np.float16(2),
    "flag": np.bool_(True),
    "complex": np.complex64(1j),
    "text": np.str_("größer"),
    "day": np.datetime64("2026-01-31"),
    "span": np.timedelta64(3, "25s"),
    "array": np.arange(6.0).reshape(2, 3).T,
    "big_endian": np.arange(3, dtype=">i4"),
    "texts": np.array(["a", "bcd"]),
    "times": np.array(["2026"], "M8[D]"),
    "nothing": np.zeros((2, 0), np.int8),
    "void": np.zeros(2, "V4"),
    "time": datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
    "date": datetime.date(2026, 1, 31),
    "path": Path("runs/1"),
    "frozen": frozenset([1, "a"]),
    "recent": deque([1.5, np.float32(2)], maxlen=4),
    "price": decimal.Decimal("1.50"),
    "id": uuid.UUID(int=7),
    "mixed": (np.arange(3), {"a", "b"}, [Path("x")]),
}


def plain(value: Any) -> Any:
    """To be compared by ==."""
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    return type(value), [plain(one) for one in value] if isinstance(value, (tuple, list, deque)) else value


@pytest.mark.parametrize("saved_by", [*FORMATS, "PyTorch"])
def test_data_of_numpy_and_the_library_is_loaded(tmp_path: Path, saved_by: str) -> None:
    state = {**DATA, "bytes": io.BytesIO(b"content")}
    if saved_by == "PyTorch":
        dcp.save(state, checkpoint_id=tmp_path)
    else:
        tcp.save(state, checkpoint_id=tmp_path, format=saved_by)
    got: dict[str, Any] = dict.fromkeys(state)
    tcp.load(got, checkpoint_id=tmp_path)
    assert got.pop("bytes").read() == b"content"
    kept = pickle.loads(pickle.dumps(DATA, 2))  # in which arrays are of this machine's byte order
    assert {name: plain(value) for name, value in got.items()} == {name: plain(value) for name, value in kept.items()}


HOSTILE_ARRAYS = {
    "a dtype of pointers": (("O8", False, True), (3, "|", None, None, None, -1, -1, 63), (2,), b"x" * 16),
    "a dtype with fields": (("V8", False, True), (3, "|", None, ("a",), {"a": ("O8", 0)}, 8, 1, 0), (2,), b"x" * 16),
    "a dtype longer than it is": (("S4", False, True), (3, "|", None, None, None, 4000, 1, 0), (2,), b"x" * 8),
    "fewer bytes than elements": (("f8", False, True), (3, "<", None, None, None, -1, -1, 0), (1000,), b"x" * 8),
    "a negative size": (("f8", False, True), (3, "<", None, None, None, -1, -1, 0), (-1, -1), b"x" * 8),
    "a list of dtypes": (([("a", "O")], False, True), (3, "|", None, None, None, -1, -1, 0), (2,), b"x" * 16),
}


class Reduced:
    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


@pytest.mark.parametrize("what", [*HOSTILE_ARRAYS, "an array that is called", "a scalar of pointers"])
def test_numpys_constructors_take_what_numpy_pickles_and_no_more(what: str) -> None:
    reconstruct, (kind, *_), _ = np.arange(1).__reduce__()
    scalar, _ = np.float64(1).__reduce__()  # type: ignore[misc]
    dtype = Reduced(np.dtype, ("O8", False, True))
    if what in HOSTILE_ARRAYS:
        made, state, shape, data = HOSTILE_ARRAYS[what]
        array = (1, shape, Reduced(np.dtype, made, state), False, data)
        hostile = Reduced(reconstruct, (kind, (0,), b"b"), array)
    elif what == "a scalar of pointers":
        hostile = Reduced(scalar, (dtype, b"x" * 8))
    else:
        hostile = Reduced(np.ndarray, ((2,), dtype, bytearray(16)))
    content = io.BytesIO()
    torch.save(hostile, content)
    assert refusal(content.getvalue()) is not None


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    with pytest.raises(ts.InvalidArgument, match=r"'a\.lock' cannot be pickled.*lock"):
        tcp.save({"a": {"lock": threading.Lock()}}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("form", FORMATS)
def test_classes_are_executed_only_for_those_who_ask(tmp_path: Path, form: str) -> None:
    state = {"args": argparse.Namespace(lr=0.5), "colour": Colour.red, "x": torch.ones(2)}
    with pytest.warns(UserWarning, match=r"'args' \(.*argparse.Namespace.*'colour' \("):
        tcp.save(state, checkpoint_id=tmp_path, format=form)
    got: dict[str, Any] = {"args": None, "colour": None, "x": torch.zeros(2)}
    with pytest.raises(ts.Unsupported, match=r"'args'.*argparse.Namespace.*weights_only=False"):
        tcp.load(got, checkpoint_id=tmp_path)
    tcp.load(got, storage_reader=tcp.FileSystemReader(tmp_path, weights_only=False))
    assert got["args"] == argparse.Namespace(lr=0.5)
    assert got["colour"] is Colour.red
    some = {"x": torch.zeros(2)}
    tcp.load(some, checkpoint_id=tmp_path)
    assert some["x"].tolist() == [1, 1]


def test_pytorchs_pickles_are_not_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    dcp.save({"bad": Hostile(), "x": torch.ones(1)}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(ts.Unsupported, match="'bad'"):
        tcp.load({"bad": None, "x": torch.zeros(1)}, checkpoint_id=tmp_path / "theirs")
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ts.Corrupt, match="system"):
        tcp.load({"x": torch.zeros(1)}, checkpoint_id=tmp_path / "theirs")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("place", ["../secret", "{outside}", ".", "fifo"])
def test_objects_that_lie_outside_are_not_read(tmp_path: Path, place: str) -> None:
    """The core does not look at what it cannot read, so that it lets such a name pass."""
    torch.save("secret", tmp_path / "secret")
    theirs = tmp_path / "theirs"
    dcp.save({"bad": {1, 2}, "x": torch.ones(1)}, checkpoint_id=theirs)
    os.mkfifo(theirs / "fifo")
    metadata = read_metadata(theirs)
    (index,) = (one for one in metadata.storage_data if one.fqn == "bad")
    hostile = ChunkStorageMetadata(torch.Size(), torch.Size())  # no description of a place, as the core sees
    vars(hostile).update(relative_path=place.format(outside=tmp_path / "secret"), offset=0, length=10_000)
    metadata.storage_data[index] = hostile
    with (theirs / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    got: dict[str, Any] = {"bad": None, "x": torch.zeros(1)}
    with pytest.raises(ts.Corrupt, match="which is not a file of the checkpoint"):
        tcp.load(got, checkpoint_id=theirs)
    assert got["bad"] is None


def test_wrappers_names_do_not_matter(tmp_path: Path) -> None:
    tcp.save({"model": {"module.w": torch.ones(2), "b": torch.full((1,), 2.0)}}, checkpoint_id=tmp_path / "wrapped")
    got = {"model": {"w": torch.zeros(2), "module.b": torch.zeros(1)}}
    tcp.load(got, checkpoint_id=tmp_path / "wrapped")
    assert got["model"]["w"].tolist() == [1, 1]
    assert got["model"]["module.b"].tolist() == [2]
    dcp.save({"model": {"module.w": torch.arange(6.0).reshape(2, 3)}}, checkpoint_id=tmp_path / "theirs")
    for name in ("w", "module.w"):
        got = {"model": {name: torch.zeros(2, 3)}}
        tcp.load(got, checkpoint_id=tmp_path / "theirs")
        assert got["model"][name].tolist() == [[0, 1, 2], [3, 4, 5]]
    # As it was saved, for an unmodified PyTorch and for the reader in its hands.
    tcp.save({"module.w": torch.ones(2)}, checkpoint_id=tmp_path / "exact", format="torch_dcp")
    exact = {"module.w": torch.zeros(2)}
    dcp.load(exact, checkpoint_id=tmp_path / "exact")
    assert exact["module.w"].tolist() == [1, 1]
    exact = {"model": {"module.w": torch.zeros(2)}}
    dcp.load(exact, storage_reader=tcp.FileSystemReader(tmp_path / "wrapped"))
    assert exact["model"]["module.w"].tolist() == [1, 1]


def test_names_of_wrappers_that_both_exist_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ts.InvalidArgument, match=r"'w' and 'module\.w' differ only by wrapper names"):
        tcp.save({"w": torch.ones(2), "module.w": torch.zeros(2)}, checkpoint_id=tmp_path / "both")
    tcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "one")
    for names in (["w", "module.w"], ["module.w", "_orig_mod.w"]):
        got = {name: torch.zeros(2) for name in names}
        with pytest.raises(ts.Mismatch, match=r"'module.w' is missing.*it has 'w'.*only by wrapper names"):
            tcp.load(got, checkpoint_id=tmp_path / "one")
        assert not any(value.any() for value in got.values())
    dcp.save({"w": torch.ones(2), "module.w": torch.full((2,), 2.0)}, checkpoint_id=tmp_path / "theirs")
    got = {"w": torch.zeros(2), "module.w": torch.zeros(2)}
    tcp.load(got, checkpoint_id=tmp_path / "theirs")
    assert [got["w"].tolist(), got["module.w"].tolist()] == [[1, 1], [2, 2]]
    with pytest.raises(ts.Mismatch, match=r"'_orig_mod\.w' is missing.*'(w|module\.w)' and '(w|module\.w)'"):
        tcp.load({"_orig_mod.w": torch.zeros(2)}, checkpoint_id=tmp_path / "theirs")


@pytest.mark.parametrize("form", FORMATS)
def test_lazy_views_are_saved_and_loaded_as_what_they_show(tmp_path: Path, form: str) -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j])
    tcp.save({"x": torch._neg_view(torch.arange(3.0)), "z": whole.conj(), "imag": whole.conj().imag},
             checkpoint_id=tmp_path, format=form)  # fmt: skip
    zero = torch.zeros(2, dtype=torch.complex64)
    got = {"x": torch._neg_view(torch.zeros(3)), "z": zero.conj(), "imag": zero.clone().conj().imag}
    assert got["x"].is_neg() and got["imag"].is_neg() and got["z"].is_conj()
    tcp.load(got, checkpoint_id=tmp_path)
    assert got["x"].tolist() == [0, -1, -2]
    assert got["z"].tolist() == [1 - 2j, 3 + 4j]
    assert got["imag"].tolist() == [-2, 4]


@pytest.mark.parametrize("form", FORMATS)
def test_names_of_one_rank_are_refused_and_others_like_them_are_not(tmp_path: Path, form: str) -> None:
    for value in (5, torch.ones(1), {1, 2}):
        with pytest.raises(ts.InvalidArgument, match="'rank/0/x': names under rank/<r>/"):
            tcp.save({"rank/0/x": value}, checkpoint_id=tmp_path, format=form)
    state = {"rank/x": 1, "rank/00/x": 2, "rank/1/": 3, "rank": 4}
    tcp.save(state, checkpoint_id=tmp_path, format=form)
    got = dict.fromkeys(state)
    tcp.load(got, checkpoint_id=tmp_path)
    assert got == state


def test_a_cast_is_told(tmp_path: Path) -> None:
    tcp.save({"x": torch.full((3,), 1.5)}, checkpoint_id=tmp_path)
    got = {"x": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.warns(UserWarning, match=r"'x' from torch.float32 to torch.bfloat16"):
        tcp.load(got, checkpoint_id=tmp_path)
    assert got["x"].tolist() == [1.5] * 3


def test_targets_of_any_strides_are_loaded_in_place(tmp_path: Path) -> None:
    tcp.save({"x": torch.arange(12.0).reshape(3, 4)}, checkpoint_id=tmp_path)
    base = torch.zeros(4, 3)
    tcp.load({"x": base.t()}, checkpoint_id=tmp_path)
    assert base.t().tolist() == torch.arange(12.0).reshape(3, 4).tolist()


def test_other_languages_read_and_write_what_pytorch_does(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    state = ts.State(model={"fc.weight": weight}, config={"lr": 0.5, "stages": [{"at": 1}]}, epoch=3)
    with ts.Saver(None, tmp_path / "root") as saver:
        saver.save(1, state)
    got = {"model": {"fc.weight": torch.zeros(2, 3)}, "config": {"lr": 0.0, "stages": [{"at": 0}]}, "epoch": 0}
    tcp.load(got, checkpoint_id=tmp_path / "root")
    assert got["model"]["fc.weight"].tolist() == weight.tolist()
    assert got["config"] == {"lr": 0.5, "stages": [{"at": 1}]}
    assert got["epoch"] == 3

    tcp.save({"model": {"fc.weight": torch.ones(2, 3)}, "epoch": 4}, checkpoint_id=tmp_path / "ours")
    array = np.zeros((2, 3), np.float32)
    state = ts.State(epoch=0)
    state["model"] = {"fc.weight": array}
    with ts.Checkpoint(tmp_path / "ours") as checkpoint:
        checkpoint.load(state)  # strictly
    assert array.tolist() == [[1, 1, 1]] * 2
    assert state["epoch"] == 4


@pytest.mark.parametrize("form", FORMATS)
def test_a_native_optimizer_goes_on_with_pytorchs_moments(tmp_path: Path, form: str) -> None:
    model = torch.nn.Linear(3, 2)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step() -> None:
        for param in model.parameters():
            param.grad = torch.arange(1.0, param.numel() + 1).reshape(param.shape)
        theirs.step()

    for _ in range(50):
        step()
    of_model, of_optim = get_state_dict(model, theirs)
    tcp.save({"model": of_model, "optim": of_optim}, checkpoint_id=tmp_path / "ck", format=form)

    params = {name: np.zeros(tuple(param.shape), np.float32) for name, param in model.named_parameters()}
    grads = {name: np.arange(1, p.size + 1, dtype=np.float32).reshape(p.shape) for name, p in params.items()}
    ours = ts.AdamW(params, grads, lr=1.0, betas=(0.5, 0.5))
    with ts.Checkpoint(tmp_path / "ck") as checkpoint:
        report = checkpoint.load(ts.State(model=params, optim=ours), allow_missing=True, allow_unexpected=True)
    assert report.missing == ("optim.param_groups.0.step",)  # which PyTorch has in the moments
    assert (ours.steps, ours.lr) == (50, 0.05)
    for _ in range(3):
        step()
        ours.step()
    for name, param in model.named_parameters():
        np.testing.assert_allclose(params[name], param.detach().numpy(), rtol=1e-6)


# --- what replaces what ---


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_a_save_replaces_the_former_one(tmp_path: Path, first: str, second: str) -> None:
    tcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path, format=first)
    tcp.save({"x": torch.full((1,), 2.0)}, checkpoint_id=tmp_path, format=second)
    assert len(list(tmp_path.glob("step-*"))) == 1
    assert (tmp_path / ".metadata").exists() == (second == "torch_dcp")
    got = {"x": torch.zeros(1)}
    tcp.load(got, checkpoint_id=tmp_path)
    assert got["x"].tolist() == [2]
    if second == "torch_dcp":
        got = {"x": torch.zeros(1)}
        dcp.load(got, checkpoint_id=tmp_path)
        assert got["x"].tolist() == [2]


@pytest.mark.parametrize("form", FORMATS)
def test_a_save_that_ends_at_its_commit_leaves_one_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    tcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path, format=form)

    def dies(*_: object) -> None:
        raise OSError("here it ended")

    with monkeypatch.context() as patch:
        patch.setattr(saves, "settle", dies)
        with pytest.raises(ts.TesseraIOError, match="here it ended"):
            tcp.save({"x": torch.full((1,), 2.0)}, checkpoint_id=tmp_path, format=form)
        future = tcp.async_save({"x": torch.full((1,), 3.0)}, checkpoint_id=tmp_path, format=form)
        assert isinstance(future.exception(timeout=patience(60)), ts.TesseraIOError)
    got = {"x": torch.zeros(1)}
    tcp.load(got, checkpoint_id=tmp_path)
    assert got["x"].tolist() == [3 if form == "tessera" else 1]  # PyTorch's commit is the .metadata
    if form == "torch_dcp":
        dcp.load(got, checkpoint_id=tmp_path)
        assert got["x"].tolist() == [1]
    tcp.save({"x": torch.full((1,), 4.0)}, checkpoint_id=tmp_path, format=form)
    assert len(list(tmp_path.glob("step-*"))) == 1
    tcp.load(got, checkpoint_id=tmp_path)
    assert got["x"].tolist() == [4]


def test_a_save_that_was_moved_away_and_linked_is_not_emptied(tmp_path: Path) -> None:
    tcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "root")
    (save,) = (tmp_path / "root").glob("step-*")
    elsewhere = save.rename(tmp_path / "elsewhere")
    save.symlink_to(elsewhere)
    tcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path / "root")
    with ts.Checkpoint(elsewhere) as moved:
        moved.verify()
        assert moved["x"].tolist() == [1]
    assert save.is_symlink()


def test_a_save_that_is_being_read_stays_until_a_later_one(tmp_path: Path) -> None:
    tcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path)
    with ts.Checkpoint(tmp_path) as reader:
        tcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path)
        assert reader["x"].tolist() == [1]
    tcp.save({"x": torch.full((1,), 2.0)}, checkpoint_id=tmp_path)
    assert len(list(tmp_path.glob("step-*"))) == 1


@pytest.mark.parametrize("end", ["", '"writer": 1}', '"writer": {}}'], ids=["cut", "no object", "no language"])
def test_a_former_save_whose_manifest_is_damaged_is_left(tmp_path: Path, end: str) -> None:
    tcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    (former,) = tmp_path.glob("step-*/manifest.json")
    former.write_text(former.read_text().split('"writer"')[0] + end)
    tcp.save({"a": torch.full((3,), 2.0)}, checkpoint_id=tmp_path)
    assert former.exists()
    read = {"a": torch.zeros(3)}
    tcp.load(read, checkpoint_id=tmp_path)
    assert read["a"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("swap", ["save", "root"])
def test_a_directory_that_is_swapped_before_a_removal_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    tcp.save({"x": torch.ones(1)}, checkpoint_id=root)
    for value in (2.0, 3.0):
        tcp.save({"x": torch.full((1,), value)}, checkpoint_id=other)
    removes = saves.remove

    def swapped(held: int, name: str, sequence: int) -> None:
        (another,) = other.glob("step-*")
        if swap == "save":
            (root / name).rename(tmp_path / "former")
            another.rename(root / name)
        else:
            another.rename(other / name)
            root.rename(tmp_path / "moved")
            root.symlink_to(other)
        removes(held, name, sequence)

    monkeypatch.setattr(saves, "remove", swapped)
    tcp.save({"x": torch.zeros(1)}, checkpoint_id=root)
    left = [save for place in (root, other) for save in place.glob("step-*")]
    assert any(ts.Checkpoint(save)["x"].tolist() == [3] for save in left)


@pytest.mark.parametrize("call", ["rename", "empty"])
def test_a_save_that_dies_as_it_removes_the_former_leaves_nothing_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path)

    def dies(*_: object, **__: object) -> None:
        raise OSError("here it ended")

    with monkeypatch.context() as patch:
        patch.setattr(saves.os if call == "rename" else saves, call, dies)
        with pytest.raises(ts.TesseraIOError, match="here it ended"):
            tcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path)
    got = {"x": torch.ones(1)}
    tcp.load(got, checkpoint_id=tmp_path)
    assert got["x"].tolist() == [0]
    tcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path)
    (save,) = tmp_path.glob("step-*")
    assert {one.name for one in tmp_path.iterdir()} == {save.name, "latest"}


def test_the_root_of_a_saver_is_no_checkpoint_id(tmp_path: Path) -> None:
    with ts.Saver(None, tmp_path) as saver:
        saver.save(5, ts.State(x=np.ones(1, np.float32)))
    for form in FORMATS:
        with pytest.raises(ts.InvalidArgument, match=f"{tmp_path} is the root of a saver .* by python.* checkpoint_id"):
            tcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path, format=form)
    assert len(list(tmp_path.glob("step-*"))) == 1
    with ts.Saver(None, tmp_path) as saver:
        assert saver.resume(ts.State(x=np.zeros(1, np.float32))) == 5


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_id_is_no_root_of_a_saver(tmp_path: Path, form: str) -> None:
    directory = tmp_path / "checkpoint"
    tcp.save({"x": torch.ones(1)}, checkpoint_id=directory, format=form)
    before = sorted(directory.rglob("*"))
    with pytest.raises(ts.InvalidArgument, match=f"{directory} is a .*give the saver its own root"):
        ts.Saver(None, directory)
    assert sorted(directory.rglob("*")) == before
    got = ts.State(x=np.zeros(1, np.float32))
    with ts.Checkpoint(directory) as checkpoint, ts.Saver(None, tmp_path / "root") as saver:  # as the message says
        checkpoint.load(got)
        saver.save(1, got)
    tcp.save({"x": torch.zeros(1)}, checkpoint_id=directory, format=form)


def test_a_checkpoint_of_pytorchs_own_is_no_root_of_a_saver(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(ts.InvalidArgument, match=r"in PyTorch's format \(it has a \.metadata\)"):
        ts.Saver(None, tmp_path)


def test_a_save_is_no_place_to_save_into(tmp_path: Path) -> None:
    tcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path)
    (save,) = tmp_path.glob("step-*")
    with pytest.raises(ts.InvalidState, match=f"save into {tmp_path}"):
        tcp.save({"x": torch.ones(1)}, checkpoint_id=save)


def test_a_value_may_have_a_tensors_name_with_a_wrapper(tmp_path: Path) -> None:
    tcp.save({"a.x": torch.ones(1), "a.module.x": 5}, checkpoint_id=tmp_path)
    got = {"a.x": torch.zeros(1), "a.module.x": 0}
    tcp.load(got, checkpoint_id=tmp_path)
    assert got["a.x"].tolist() == [1]
    assert got["a.module.x"] == 5


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.zeros((1,) * 9), "has 9 dimensions"),
        (torch.nn.LazyLinear(2).weight, "is a lazy parameter"),
        (threading.Lock(), "cannot be pickled"),
        (lambda: 0, "cannot be pickled"),
    ],
    ids=["9-d", "lazy", "lock", "lambda"],
)
def test_what_cannot_be_saved_is_told_by_its_name(tmp_path: Path, value: object, why: str) -> None:
    state = {"model": {"ok": torch.ones(2), "odd": value}}
    with pytest.raises(ts.InvalidArgument, match=rf"'model\.odd' {why}"):
        tcp.save(state, checkpoint_id=tmp_path / "a")


def test_what_pytorch_needs_beside_the_values_is_no_value(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    tcp.save({"app": {"n": 1, "w": torch.ones(2)}}, checkpoint_id=path)
    with ts.Checkpoint(path) as checkpoint:
        assert "rank/0/torch" in checkpoint.manifest["values"]
        assert checkpoint.saved_values == {"app.n": 1}
    told = subprocess.run(
        [str(TESSERA), "ckpt", "info", path], capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert "app.n = 1" in told.stdout
    assert "rank/0/torch" not in told.stdout


def test_overwrite_false_refuses(tmp_path: Path) -> None:
    careful = tcp.FileSystemWriter(tmp_path, overwrite=False)
    tcp.save({"x": torch.ones(1)}, storage_writer=careful)
    with pytest.raises(ts.InvalidState, match="overwrite"):
        tcp.save({"x": torch.ones(1)}, storage_writer=careful)
    with pytest.raises(dcp.CheckpointException, match="overwrite"):
        dcp.save({"x": torch.ones(1)}, storage_writer=careful)


@pytest.mark.parametrize("form", FORMATS)
def test_files_of_torch_save_are_made_and_taken(tmp_path: Path, form: str) -> None:
    state = {"model": {"net.weight": torch.arange(4.0)}, "groups": [{"lr": 0.1, "params": ["net.weight"]}], "epoch": 3}
    torch.save(state, tmp_path / "first.pt")
    format_utils.torch_save_to_dcp(tmp_path / "first.pt", tmp_path / "saved", format=form)
    format_utils.dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["model"].pop("net.weight").tolist() == [0, 1, 2, 3]
    assert whole == {**state, "model": {}}
    torch.save({"args": argparse.Namespace()}, tmp_path / "more.pt")
    with pytest.raises(ts.Unsupported, match=r"more.pt holds more.*weights_only=False"):
        format_utils.torch_save_to_dcp(tmp_path / "more.pt", tmp_path / "saved")


@pytest.mark.parametrize("form", FORMATS)
def test_pytorchs_converter_gives_the_nested_state_back(tmp_path: Path, form: str) -> None:
    state = {"model": {"net.weight": torch.arange(4.0)}, "groups": [{"lr": 0.1, "params": ["net.weight"]}], "epoch": 3}
    tcp.save(state, checkpoint_id=tmp_path / "saved", format=form)
    if form == "torch_dcp":
        dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
        whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    else:
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

        whole = {}
        planner = _EmptyStateDictLoadPlanner()
        reader = tcp.FileSystemReader(tmp_path / "saved")
        dcp.state_dict_loader._load_state_dict(whole, storage_reader=reader, planner=planner, no_dist=True)
    assert whole["model"]["net.weight"].tolist() == [0, 1, 2, 3]
    assert whole["groups"] == state["groups"]
    assert whole["epoch"] == 3


def test_a_file_of_torch_save_loads(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.arange(3.0)}, "epoch": 3}, tmp_path / "x.pt")
    got = {"model": {"w": torch.zeros(3)}, "epoch": 0}
    tcp.load(got, checkpoint_id=tmp_path / "x.pt")
    assert got["model"]["w"].tolist() == [0, 1, 2]
    assert got["epoch"] == 3


# --- planners, and PyTorch's own functions ---


class Half(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data.to(torch.bfloat16) if isinstance(data, torch.Tensor) else data


class Renaming(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"new_{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("module", [tcp, dcp], ids=["ours", "theirs"])
def test_planners_of_ones_own_are_heard(tmp_path: Path, form: str, module: Any) -> None:
    writer = tcp.FileSystemWriter(tmp_path, format=form)
    module.save({"new_x": torch.full((2,), 1.5), "new_n": 3}, storage_writer=writer, planner=Half())
    with ts.Checkpoint(tmp_path) as ours:
        assert ours.tensors["new_x"].dtype is ts.DType.BF16
    got = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    module.load(got, storage_reader=tcp.FileSystemReader(tmp_path), planner=Renaming())
    assert got["x"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("form", FORMATS)
def test_states_may_stay_nested(tmp_path: Path, form: str) -> None:
    state = {"config": {"lr": 0.5, "at": [{"step": 1}]}, "list": [{"x": 1}], "x": torch.ones(2)}
    tcp.save(state, checkpoint_id=tmp_path, format=form, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    readers = [None, tcp.FileSystemReader(tmp_path)]
    for load, reader in zip((tcp.load, dcp.load), readers, strict=True):
        got: dict[str, Any] = {"config": None, "list": None, "x": torch.zeros(2)}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(got, checkpoint_id=tmp_path, storage_reader=reader, planner=planner)
        assert got["config"] == state["config"]
        assert got["list"] == state["list"]
        assert got["x"].tolist() == [1, 1]


def test_cached_plans_are_taken(tmp_path: Path) -> None:
    dcp.SavePlanner._cached_save_plan.clear()
    writer = tcp.FileSystemWriter(tmp_path)
    for turn in range(3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        state = {"x": torch.full((2,), float(turn)), "n": turn}
        tcp.save(state, storage_writer=writer, planner=planner)
        got = {"x": torch.zeros(2), "n": -1}
        tcp.load(got, checkpoint_id=tmp_path)
        assert got["x"].tolist() == [turn, turn]
        assert got["n"] == turn


def test_other_storage_classes_are_pytorchs(tmp_path: Path) -> None:
    tcp.save({"x": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    assert (tmp_path / "__0_0.distcp").exists()
    got = {"x": torch.zeros(1)}
    tcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path))
    assert got["x"].tolist() == [1]


def test_the_older_names_work(tmp_path: Path) -> None:
    tcp.save_state_dict({"x": torch.ones(1), "n": 1}, tcp.FileSystemWriter(tmp_path))
    got = {"x": torch.zeros(1), "n": 0}
    tcp.load_state_dict(got, tcp.FileSystemReader(tmp_path))
    assert got["x"].tolist() == [1]
    assert got["n"] == 1


@pytest.mark.filterwarnings("ignore:fsync not supported")
def test_urls_are_pytorchs_to_write_and_read() -> None:
    url = f"memory://{uuid.uuid4()}"
    state = {"x": torch.arange(3.0), "n": 3}
    tcp.save(state, checkpoint_id=url)
    got = {"x": torch.zeros(3), "n": 0}
    tcp.load(got, checkpoint_id=url)
    assert got["x"].tolist() == [0, 1, 2] and got["n"] == 3
    with pytest.raises(ts.Unsupported, match="PyTorch's own format"):
        tcp.save(state, checkpoint_id=url, format="tessera")
    for unknown in ("nosuch://bucket/x", "abfs://bucket/x"):
        for use in (tcp.save, tcp.load):
            with pytest.raises(ts.InvalidArgument, match=f"'{unknown}' is a URL that cannot be opened: "):
                use(state, checkpoint_id=unknown)
    with pytest.raises(ts.InvalidArgument, match="FsspecReader"):
        tcp.FileSystemReader(url)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("module", [tcp, dcp])
def test_keys_that_are_no_texts_keep_their_place(tmp_path: Path, form: str, module: Any) -> None:
    def scheduler(steps: int) -> Any:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        made = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 4])
        for _ in range(steps):
            optimizer.step()
            made.step()
        return made

    first, second = scheduler(3), scheduler(0)
    state = {"scheduler": first.state_dict(), "of": {0: {"name": "a", 1: [2, {3: "b"}]}, (1, 2): 4.5}}
    for _ in range(2):
        module.save(state, storage_writer=tcp.FileSystemWriter(tmp_path, format=form))
        got: dict[str, Any] = {"scheduler": second.state_dict(), "of": {0: {"name": "", 1: [0, {3: ""}]}, (1, 2): 0.0}}
        module.load(got, storage_reader=tcp.FileSystemReader(tmp_path))
        second.load_state_dict(got["scheduler"])
        assert second.state_dict() == first.state_dict()
        assert second.milestones == {2: 2, 4: 1} and second.get_last_lr() == first.get_last_lr()
        assert got["of"] == state["of"]
        state = got


def test_a_partial_load_leaves_the_rest(tmp_path: Path) -> None:
    tcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path)
    got = {"a": torch.zeros(1), "b": torch.full((1,), 7.0), "n": 5}
    with pytest.raises(ts.Mismatch, match=r"2 differences:\n  'b' is missing.*\n  'n' is missing"):
        tcp.load(got, checkpoint_id=tmp_path)
    assert got["a"].tolist() == [0]
    tcp.load(got, checkpoint_id=tmp_path, planner=tcp.DefaultLoadPlanner(allow_partial_load=True))
    assert [got["a"].item(), got["b"].item(), got["n"]] == [1, 7, 5]


def test_stateful_members_are_called(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    counter = Counter()
    counter.count = 5
    tcp.save({"counter": counter}, checkpoint_id=tmp_path)
    counter.count = 0
    tcp.load({"counter": counter}, checkpoint_id=tmp_path)
    assert counter.count == 5


# --- asynchronous saves ---


def test_one_save_is_in_flight_at_a_time(tmp_path: Path) -> None:
    large = torch.zeros(4_000_000)
    futures = []
    for turn in range(3):
        large.fill_(turn)
        future = tcp.async_save({"x": large}, checkpoint_id=tmp_path / str(turn))
        assert all(former.done() for former in futures)
        futures.append(future)
    large.fill_(-1)
    for turn, future in enumerate(futures):
        assert set(future.result(timeout=patience(60)).state_dict_metadata) == {"x"}
        with ts.Checkpoint(tmp_path / str(turn)) as ours:
            assert np.all(ours["x"] == turn)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("module", [tcp, dcp])
def test_a_program_may_go_elsewhere_while_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, module: Any
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    go_on, settle = threading.Event(), saves.settle
    prepare = tcp.FileSystemWriter.prepare_local_plan  # where PyTorch plans, in the background
    monkeypatch.setattr(saves, "settle", lambda *of: go_on.wait(patience(60)) and settle(*of))
    monkeypatch.setattr(
        tcp.FileSystemWriter, "prepare_local_plan", lambda *of: go_on.wait(patience(60)) and prepare(*of)
    )
    storage = tcp.FileSystemWriter("checkpoint", format=form)
    future = module.async_save({"x": torch.ones(1000)}, storage_writer=storage)
    monkeypatch.chdir("other")
    go_on.set()
    future.result(timeout=patience(60))
    got = {"x": torch.zeros(1000)}
    tcp.load(got, checkpoint_id=tmp_path / "checkpoint")
    assert got["x"].sum() == 1000
    assert list((tmp_path / "other").iterdir()) == []


def test_a_kept_copy_uses_its_memory_again(tmp_path: Path) -> None:
    writer = tcp.FileSystemWriter(tmp_path, cached_state_dict=True)
    assert writer.cache_staged_state_dict
    addresses = set()
    tensor = torch.zeros(1000)
    for turn in range(3):
        tensor.fill_(turn)
        future = tcp.async_save({"x": tensor}, storage_writer=writer)
        tensor.fill_(-1)
        future.result(timeout=patience(60))
        with ts.Checkpoint(tmp_path) as ours:
            assert np.all(ours["x"] == turn)
        assert writer.copies is not None
        addresses |= {copy.data_ptr() for copy in writer.copies._kept.values()}
    assert len(addresses) == 1


def test_a_program_that_ends_waits_for_its_last_save(tmp_path: Path) -> None:
    program = (
        "import sys, torch\nimport tessera.torch.checkpoint as tcp\n"
        "tcp.async_save({'x': torch.ones(3_000_000)}, checkpoint_id=sys.argv[1])\n"
    )
    done = run_python("-c", program, tmp_path)
    assert done.returncode == 0, done.stderr
    with ts.Checkpoint(tmp_path) as ours:
        assert np.all(ours["x"] == 1)


# --- errors ---


@pytest.mark.parametrize("in_background", [False, True])
def test_a_writer_tells_its_progress_and_keeps_to_its_limit(tmp_path: Path, in_background: bool) -> None:
    told: list[tuple[ts.Phase, int, int]] = []
    size = 24 << 20
    state = {"weight": torch.arange(size // 4, dtype=torch.float32)}
    begin = time.monotonic()
    writer = tcp.FileSystemWriter(
        tmp_path / "c", progress=lambda *what: told.append(what), low_priority=True, write_bytes_per_s=size
    )
    if in_background:
        tcp.async_save(state, storage_writer=writer).result()
    else:
        tcp.save(state, storage_writer=writer)
    assert time.monotonic() - begin > 0.4
    assert any(phase is ts.Phase.WRITE and done == total >= size for phase, done, total in told)
    assert all(done <= total for _, done, total in told)

    def stumbles(*_: object) -> None:
        raise ValueError("no bar")

    with pytest.raises(ValueError, match="no bar"):
        tcp.save(state, storage_writer=tcp.FileSystemWriter(tmp_path / "c", progress=stumbles))
    loaded = {"weight": torch.zeros(size // 4)}
    told.clear()
    tcp.load(loaded, storage_reader=tcp.FileSystemReader(tmp_path / "c", progress=lambda *what: told.append(what)))
    assert torch.equal(loaded["weight"], state["weight"])
    assert told[-1] == (ts.Phase.READ, size, size), "of a reader, too"
    with pytest.raises(ValueError, match="no bar"):
        tcp.load(loaded, storage_reader=tcp.FileSystemReader(tmp_path / "c", progress=stumbles))


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_low_priority_is_that_of_the_threads_that_write(tmp_path: Path, low: bool, cached: bool) -> None:
    told = set()

    def tell(phase: ts.Phase, done: int, total: int) -> None:
        if phase is ts.Phase.WRITE:
            told.add(niceness())

    writer = tcp.FileSystemWriter(tmp_path, cached_state_dict=cached, low_priority=low, progress=tell)
    tcp.async_save({"x": torch.zeros(1000)}, storage_writer=writer).result(timeout=patience(60))
    assert told == {max(niceness(), 10) if low else niceness()}


def test_wrong_arguments_are_told() -> None:
    x = {"x": torch.ones(1)}
    with pytest.raises(ts.InvalidArgument, match="checkpoint_id or storage_writer"):
        tcp.save(x)
    with pytest.raises(ts.InvalidArgument, match="checkpoint_id or storage_reader"):
        tcp.load(x)
    with pytest.raises(ts.InvalidArgument, match="s3://bucket/x is a URL"):
        tcp.FileSystemWriter("s3://bucket/x")
    with pytest.raises(ts.InvalidArgument, match="'zip'; it must be one of tessera, torch_dcp"):
        tcp.save(x, checkpoint_id="x", format="zip")
    with pytest.raises(ts.InvalidArgument, match="the storage_writer decides the format"):
        tcp.save(x, storage_writer=tcp.FileSystemWriter("x"), format="tessera")
    with pytest.raises(ts.Unsupported, match="durable"):
        tcp.FileSystemWriter("x", sync_files=False)
    with pytest.raises(ts.Unsupported, match="use_collectives=False"):
        tcp.save(x, checkpoint_id="x", use_collectives=False)
    with pytest.raises(ts.Unsupported, match="sparse"):
        tcp.save({"x": torch.ones(2, 2).to_sparse()}, checkpoint_id="x")
    assert not Path("x").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_damage_is_found(tmp_path: Path, form: str) -> None:
    tcp.save({"x": torch.ones(300_000)}, checkpoint_id=tmp_path, format=form)
    file = max(tmp_path.glob("step-*/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ts.Corrupt, match=file.name):
        tcp.load({"x": torch.zeros(300_000)}, checkpoint_id=tmp_path)
    done = subprocess.run(
        [str(TESSERA), "ckpt", "verify", str(tmp_path)], capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode != 0
    assert file.name in done.stdout + done.stderr


def test_a_tensor_that_was_given_other_memory_is_saved_and_loaded_there(tmp_path: Path) -> None:
    whole, piece = torch.ones(4), torch.ones(4)
    layout = ts.Layout((4,), [1], [ts.Replicate()])
    state = ts.State(whole=whole, piece=ts.Sharded(layout, [piece], 0))
    with ts.init() as comm, ts.Saver(comm, tmp_path) as saver:
        saver.save(1, state)
        whole.data, piece.data = torch.full((4,), 2.0), torch.full((4,), 3.0)
        saver.save(2, state)
        whole.data, piece.data = torch.zeros(4), torch.zeros(4)
        assert saver.resume(state) == 2
    assert (whole.tolist(), piece.tolist()) == ([2.0] * 4, [3.0] * 4)
