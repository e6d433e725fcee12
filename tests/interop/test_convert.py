"""``tessera ckpt convert --to safetensors``: safetensors and PyTorch read what three ranks saved, bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT  # noqa: F401 (puts programs on the path)
from patience import patience
from programs import TESSERA

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
ts = pytest.importorskip("tessera")

PROGRAM = """
import sys
import numpy as np
import tessera as ts

with ts.init() as comm:
    state = ts.State()
    for name, shape, dim, dtype in [
        ("rows", (11, 3), 0, "float32"), ("columns", (5, 10), 1, "int64"), ("few", (2,), 0, "float16"),
        ("whole", (3000, 500), None, "float32"), ("scalar", (), None, "float64"), ("mask", (7,), None, "bool"),
        ("empty", (0, 4), None, "float32"), ("bytes", (9, 9), 1, "uint8"),
    ]:
        content = (np.arange(int(np.prod(shape))) % 100).reshape(shape).astype(dtype)
        if dim is None:
            state["model." + name] = content
            continue
        layout = ts.Layout(shape, (comm.world_size,), (ts.Shard(dim),))
        pieces = [np.ascontiguousarray(content[box.slices]) for box in layout.boxes(comm.rank)]
        state["model." + name] = ts.Sharded(layout, pieces, comm.rank, dtype)
    with ts.Saver(comm, sys.argv[1]) as saver:
        saver.save(7, state)
"""

# Runs a command and prints its highest memory in KiB.
PEAK = """
import os, sys

pid = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("convert")
    program = directory / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    root = directory / "checkpoints"
    done = subprocess.run(
        [str(TESSERA), "run", "-n", "3", sys.executable, str(program), str(root)],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def convert(checkpoint: Path, out: Path, *options: str) -> dict:
    done = subprocess.run(
        [str(TESSERA), "ckpt", "convert", str(checkpoint), str(out), "--json", *options],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def expected(checkpoint: Path) -> dict[str, np.ndarray]:
    with ts.Checkpoint(checkpoint) as ours:
        return {name.removeprefix("model."): ours[name] for name in ours}


def assert_same(read: dict, wanted: dict[str, np.ndarray]) -> None:
    assert sorted(read) == sorted(wanted)
    for name, value in wanted.items():
        assert tuple(read[name].shape) == value.shape, name
        assert read[name].numpy().dtype == value.dtype, name
        assert read[name].numpy().tobytes() == value.tobytes(), name


def test_one_file_is_loaded_by_safetensors(checkpoint: Path, tmp_path: Path) -> None:
    told = convert(checkpoint, tmp_path / "hf", "--to", "safetensors", "--under", "model.")
    assert told["files"] == ["model.safetensors"]
    assert_same(safetensors_torch.load_file(tmp_path / "hf" / "model.safetensors"), expected(checkpoint))


def test_sharded_files_are_loaded_by_their_index(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    convert(checkpoint, out, "--to", "safetensors", "--under", "model.", "--shard-size", "1KiB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    read = {}
    for file in files:
        part = safetensors_torch.load_file(out / file)
        assert all(index["weight_map"][name] == file for name in part)
        read |= part
    wanted = expected(checkpoint)
    assert_same(read, wanted)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())


def test_a_checkpoint_put_together_is_read_by_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    told = convert(checkpoint, tmp_path / "native", "--to", "native")
    wanted = expected(checkpoint)
    state = {"model." + name: torch.from_numpy(np.ones_like(value)) for name, value in wanted.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(told["path"]), no_dist=True)
    assert_same({name.removeprefix("model."): value for name, value in state.items()}, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["native", "safetensors", "torch_dcp", "torch_save"])
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, form: str) -> None:
    """Two tensors of 192 MiB, of which no more than a part is in memory at any time."""
    one = np.zeros((192, 1 << 18), np.float32)
    one[:, 0] = np.arange(192)
    with ts.Saver(None, tmp_path / "from") as saver:
        saver.save(1, ts.State(a=one, b=one))
    command = [str(TESSERA), "ckpt", "convert", str(tmp_path / "from"), str(tmp_path / "to"), "--to", form]
    # Through a small process: a child's highest memory begins with that of the one it was forked from.
    told = subprocess.run([sys.executable, "-c", PEAK, *command], capture_output=True, text=True, timeout=patience(120))
    assert told.returncode == 0, told.stderr
    peak = int(told.stdout.splitlines()[-1])
    with ts.Checkpoint(tmp_path / "to") as read:
        assert all((read[name][:, 0] == one[:, 0]).all() and read[name].shape == one.shape for name in "ab")
    assert peak < 160 << 10, f"{peak >> 10} MiB"


@pytest.mark.slow
def test_two_checkpoints_are_compared_in_bounded_memory(tmp_path: Path) -> None:
    """Of 192 MiB each, the last row of which differs."""
    one = np.zeros((192, 1 << 18), np.float32)
    for name in ("a", "b"):
        with ts.Saver(None, tmp_path / name) as saver:
            saver.save(1, ts.State(w=one))
        one[-1, -1] = 3
    command = [str(TESSERA), "ckpt", "diff", str(tmp_path / "a"), str(tmp_path / "b")]
    told = subprocess.run([sys.executable, "-c", PEAK, *command], capture_output=True, text=True, timeout=patience(120))
    assert told.returncode == 1, told.stderr
    assert "1 of 50331648 differ, max abs 3 at [191, 262143]" in told.stdout
    peak = int(told.stdout.splitlines()[-1])
    assert peak < 160 << 10, f"{peak >> 10} MiB"


# Ranks write one file together, each in memory for a part of a tensor.
EXPORT = """
import resource, sys
import tessera as ts

with ts.init() as comm, ts.Checkpoint(sys.argv[1]) as checkpoint:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint.export(sys.argv[2], comm, format=sys.argv[3])
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "torch_dcp", "torch_save"])
def test_memory_of_ranks_that_export_together_is_bounded(tmp_path: Path, form: str) -> None:
    one = np.zeros((192, 1 << 18), np.float32)
    one[:, 0] = np.arange(192)
    with ts.Saver(None, tmp_path / "from") as saver:
        saver.save(1, ts.State(a=one))
    program = tmp_path / "program.py"
    program.write_text(EXPORT, encoding="utf-8")
    done = subprocess.run(
        [
            str(TESSERA),
            "run",
            "-n",
            "2",
            sys.executable,
            str(program),
            str(tmp_path / "from"),
            str(tmp_path / "to"),
            form,
        ],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    peaks = [int(line.rsplit(None, 1)[1]) for line in done.stdout.splitlines() if "peak" in line]
    assert len(peaks) == 2
    assert max(peaks) < 100 << 10, f"{max(peaks) >> 10} MiB"
    with ts.Checkpoint(tmp_path / "to") as read:
        assert (read["a"] == one).all()
