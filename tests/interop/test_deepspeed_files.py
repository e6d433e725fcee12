"""Checkpoints that real DeepSpeed wrote (deepspeed_files.py made them): Python loads them at any world size, the
command converts and verifies them, and an optimizer of Tessera goes on from their moments. Needs neither DeepSpeed nor
PyTorch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TESSERA
from patience import patience

ts = pytest.importorskip("tessera")

FILES = Path(__file__).resolve().parent / "deepspeed" / "files.tar.gz"
with tarfile.open(FILES) as _archive:
    CASES = sorted({name.split("/")[0] for name in _archive.getnames()})
TAG = "after-2"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(FILES) as archive:
        archive.extractall(directory, filter="data")
    return directory


def ckpt(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([str(TESSERA), "ckpt", *arguments], capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def contents(path: Path, under: str = "") -> dict[str, tuple[Any, tuple[int, ...], bytes]]:
    """Name: dtype, shape and bits of every tensor."""
    with ts.Checkpoint(path) as checkpoint:
        names = [name for name in checkpoint if name.startswith(under)]
        return {n: (str(checkpoint.tensors[n].dtype), checkpoint[n].shape, checkpoint[n].tobytes()) for n in names}


@pytest.mark.parametrize("case", CASES)
def test_python_reads_what_deepspeed_has(written: Path, case: str) -> None:
    expected = contents(written / case / "expected" / "tensors.safetensors")
    assert contents(written / case) == expected
    facts = json.loads((written / case / "expected" / "facts.json").read_text("utf-8"))
    with ts.Checkpoint(written / case / TAG) as checkpoint:
        assert checkpoint.step == facts["step"]
        assert checkpoint.manifest["world_size"] == facts["world_size"]
        assert checkpoint.unreadable == {}
        values = checkpoint.saved_values
        assert values["client_state.note"] == "größer"
        assert values["client_state.pair"] == (1, "b")
        assert values["client_state.nested.deep.n"] == -7
        assert values["engine.global_steps"] == facts["step"]
        assert values["optim.param_groups.0.eps"] == facts["values"]["optim.param_groups.0.eps"]


@pytest.mark.parametrize("to", ["native", "safetensors", "torch_save"])
@pytest.mark.parametrize("case", ["stage0-bf16-1", "stage1-bf16-2", "stage2-fp32-2", "stage3-bf16-3"])
def test_the_command_converts_them(written: Path, tmp_path: Path, case: str, to: str) -> None:
    expected = contents(written / case / "expected" / "tensors.safetensors")
    ckpt("convert", str(written / case), str(tmp_path / "out"), "--to", to)
    assert contents(tmp_path / "out") == expected
    if to == "native":
        with ts.Checkpoint(tmp_path / "out") as checkpoint, ts.Checkpoint(written / case) as theirs:
            assert checkpoint.saved_values == theirs.saved_values
            assert checkpoint.step == theirs.step


@pytest.mark.parametrize("case", ["stage0-fp32-2", "stage2-bf16-3", "stage3-fp32-2"])
def test_the_command_shows_and_verifies_them(written: Path, case: str) -> None:
    info = json.loads(ckpt("info", "--json", str(written / case)))
    facts = json.loads((written / case / "expected" / "facts.json").read_text("utf-8"))
    assert (info["format"], info["step"], info["world_size"]) == ("deepspeed", facts["step"], facts["world_size"])
    assert info["writer"]["library"] == "DeepSpeed"
    assert json.loads(ckpt("verify", "--json", str(written / case)))["sound"]
    listed = json.loads(ckpt("ls", "--json", str(written / case / TAG)))
    assert [one["state"] for one in listed] == ["committed"]
    tree = json.loads(ckpt("tree", "--json", str(written / case)))
    assert tree["tensors"]["model.head.weight"]["alias_of"] == "model.embed.weight"
    assert ckpt("diff", str(written / case), str(written / case / TAG), "--json")


def test_the_command_names_the_file_of_a_lost_rank(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "stage3-fp32-2", tmp_path / "copy")
    lost = tmp_path / "copy" / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    lost.unlink()
    assert lost.name in ckpt("convert", str(tmp_path / "copy"), str(tmp_path / "out"), "--to", "native", code=1)
    assert not (tmp_path / "out").exists()


LOADER = """
import sys
import numpy as np
import tessera as ts

# Every tensor cut over the ranks along its longest dimension, compared with its part of the expected one.
with ts.init() as comm, ts.Checkpoint(sys.argv[1]) as checkpoint, ts.Checkpoint(sys.argv[2]) as expected:
    state, pieces = ts.State(), {}
    for name, info in checkpoint.tensors.items():
        if not info.shape:
            continue
        dim = int(np.argmax(info.shape))
        layout = ts.Layout(info.shape, (comm.world_size,), (ts.Shard(dim),))
        boxes = layout.boxes(comm.rank)
        pieces[name] = [(box, np.empty(box.sizes, info.dtype.numpy)) for box in boxes]
        state[name] = ts.Sharded(layout, [piece for _, piece in pieces[name]], comm.rank, info.dtype)
    checkpoint.load(state, comm=comm, allow_unexpected=True)
    for name, parts in pieces.items():
        for box, piece in parts:
            assert piece.tobytes() == np.ascontiguousarray(expected[name][box.slices]).tobytes(), (name, box)
    print(f"rank {comm.rank} compared {len(pieces)}")
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", ["stage1-fp32-3", "stage3-bf16-3"])
def test_any_number_of_ranks_loads_its_shards(written: Path, tmp_path: Path, case: str, ranks: int) -> None:
    (tmp_path / "loader.py").write_text(LOADER, encoding="utf-8")
    command = [str(TESSERA), "run", "-n", str(ranks), sys.executable, str(tmp_path / "loader.py")]
    paths = [str(written / case), str(written / case / "expected" / "tensors.safetensors")]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(ranks):
        assert f"rank {rank} compared " in done.stdout


@pytest.mark.parametrize("case", ["stage1-fp32-3", "stage2-fp32-2", "stage3-fp32-1"])
def test_an_optimizer_goes_on_from_their_moments(written: Path, case: str) -> None:
    with ts.Checkpoint(written / case / "expected" / "tensors.safetensors") as checkpoint:
        expected = dict(checkpoint.items())
    names = ["hidden.weight", "hidden.bias", "embed.weight"] if "model.hidden.bias" in expected else ["weight"]
    params = {name: np.zeros_like(expected[f"model.{name}"]) for name in names}
    grads = {name: np.full_like(param, 0.125) for name, param in params.items()}
    optimizer = ts.AdamW(params, grads, lr=0.5)
    state = ts.State(model=params, optim=optimizer)
    with ts.Checkpoint(written / case) as checkpoint:
        # DeepSpeed has two groups, and settings that this optimizer lacks.
        checkpoint.load(state, allow_missing=True, allow_unexpected=True)
        settings = {
            key: checkpoint.saved_values[f"optim.param_groups.0.{key}"] for key in ("lr", "eps", "weight_decay")
        }
        beta1, beta2 = checkpoint.saved_values["optim.param_groups.0.betas"]
    assert optimizer.lr == settings["lr"]
    wanted = {}
    for name in names:
        step = expected[f"optim.state.{name}.step"].item() + 1
        first = expected[f"optim.state.{name}.exp_avg"] * beta1 + 0.125 * (1 - beta1)
        second = expected[f"optim.state.{name}.exp_avg_sq"] * beta2 + 0.125**2 * (1 - beta2)
        size = np.sqrt(second / (1 - beta2**step)) + settings["eps"]
        decayed = expected[f"model.{name}"] * (1 - settings["lr"] * settings["weight_decay"])
        wanted[name] = decayed - settings["lr"] * first / (1 - beta1**step) / size
    optimizer.step()
    for name in names:
        np.testing.assert_allclose(params[name], wanted[name], rtol=1e-5, atol=1e-7, err_msg=name)
