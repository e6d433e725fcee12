"""Exports as files of torch.save, by one process and by three ranks: an unmodified PyTorch loads them, bit by bit."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ts = pytest.importorskip("tessera")
pytest.importorskip("safetensors.torch")

from test_hf_layouts import assert_same, assert_tessera_reads, ckpt, convert_by, every_dtype  # noqa: E402


def loaded(path: Path) -> dict[str, Any]:
    """The same by every way of loading."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    ways = [{"weights_only": True}, {"weights_only": True, "mmap": True}, {"weights_only": False}]
    states = [torch.load(path, **way) for way in ways]
    tensors = [{k: v for k, v in state.items() if isinstance(v, torch.Tensor)} for state in states]
    for state, other in zip(states[1:], tensors[1:], strict=True):
        assert_same(other, tensors[0])
        assert list(state) == list(states[0])
    return states[0]


@pytest.mark.parametrize("ranks", [0, 3])
def test_what_is_converted_is_loaded_by_pytorch(tmp_path: Path, ranks: int) -> None:
    wanted = every_dtype() | {"large": torch.arange(1_000_003.0)}
    wanted |= {"complex128": torch.arange(5).to(torch.complex128), "empty": torch.empty(0), "odd.name": torch.ones(3)}
    torch.save(wanted | {"step": 7}, tmp_path / "in.pt")
    convert_by(ranks, tmp_path / "in.pt", tmp_path / "out", "torch_save")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.pt"]
    state = loaded(tmp_path / "out" / "model.pt")
    assert state.pop("step") == 7
    assert_same(state, wanted)
    assert_tessera_reads(tmp_path / "out", wanted)
    assert json.loads(ckpt("verify", "--json", str(tmp_path / "out" / "model.pt")))["sound"]


def test_a_file_of_empty_tensors_is_loaded(tmp_path: Path) -> None:
    wanted = {"a": torch.empty(0), "b": torch.empty(3, 0, dtype=torch.float8_e5m2)}
    torch.save(wanted, tmp_path / "in.pt")
    ckpt("convert", str(tmp_path / "in.pt"), str(tmp_path / "out"), "--to", "torch_save")
    assert_same(loaded(tmp_path / "out" / "model.pt"), wanted)


VALUES = {
    "none": None,
    "flag": True,
    "least": -(2**63),
    "big": -(10**600),
    "float": 0.1,
    "inf": -math.inf,
    "text": "ünï\n",
    "bytes": bytes(range(256)),
    "tuple": (1, ("x", b"")),
    "map": {1: "a", None: b"", (2, 3): {"deep": True}},
    "dict": {"lr": 0.5, "milestones": [1, 2], "inner": {"a": None}},
    "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2}],
    "empty": {},
    "optim.lr": 1e-3,
}


def test_values_are_python_s_own_and_names_are_keys(tmp_path: Path) -> None:
    with ts.Saver(None, tmp_path / "root") as saver:
        saver.save(1, ts.State(model={"w": np.ones(3)}, **VALUES))
    ckpt("convert", str(tmp_path / "root"), str(tmp_path / "out"), "--to", "torch_save")
    state = loaded(tmp_path / "out" / "model.pt")
    assert state.pop("model.w").tolist() == [1, 1, 1]
    assert state == VALUES
    for name, value in VALUES.items():
        assert type(state[name]) is type(value), name
    # Tessera names them by their paths, but for the dict with a tuple as a key.
    with ts.Checkpoint(tmp_path / "out") as ours:
        assert ours.saved_values["dict.inner.a"] is None
        assert ours.saved_values["groups.0.betas"] == (0.9, 0.99)
        assert ours.saved_values["map"] == VALUES["map"]
        assert ours.unreadable == {}


def test_tied_names_are_one_storage(tmp_path: Path) -> None:
    tied = np.arange(6, dtype=np.float32).reshape(2, 3)
    with ts.Saver(None, tmp_path / "root") as saver:
        saver.save(1, ts.State(embedding={"weight": tied}, head={"weight": tied}, bias=np.zeros(3)))
    ckpt("convert", str(tmp_path / "root"), str(tmp_path / "out"), "--to", "torch_save")
    state = loaded(tmp_path / "out" / "model.pt")
    assert sorted(state) == ["bias", "embedding.weight", "head.weight"]
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state["head.weight"].tolist() == tied.tolist()
    with zipfile.ZipFile(tmp_path / "out" / "model.pt") as archive:
        assert sum(name.startswith("archive/data/") for name in archive.namelist()) == 2


def test_a_module_loads_its_part_and_the_way_back_is_the_same(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model(torch.randn(5, 3))
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "in.pt")
    ckpt("convert", str(tmp_path / "in.pt"), str(tmp_path / "native"), "--to", "native")
    ckpt("convert", str(tmp_path / "native"), str(tmp_path / "part"), "--to", "torch_save", "--under", "model.")
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(loaded(tmp_path / "part" / "model.pt"))
    assert_same(other.state_dict(), model.state_dict())
    ckpt("convert", str(tmp_path / "native"), str(tmp_path / "whole"), "--to", "torch_save")
    ckpt("convert", str(tmp_path / "whole"), str(tmp_path / "back"), "--to", "native")
    assert json.loads(ckpt("diff", "--json", str(tmp_path / "native"), str(tmp_path / "back")))["same"]


def test_a_size_of_files_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    ckpt(
        "convert",
        str(tmp_path / "in.pt"),
        str(tmp_path / "out"),
        "--to",
        "torch_save",
        "--max-shard-size",
        "1KB",
        code=2,
    )
    assert not (tmp_path / "out").exists()
