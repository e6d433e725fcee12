"""PyTorch's own HuggingFaceStorageReader, unmodified, on native checkpoints: every layout and dtype, bit by bit.

Three ranks write shards by rows and columns, explicit boxes (a rank's second piece goes into its second file), tensors
split over replicas, scalars and empty tensors; PyTorch puts them together, whole and by part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import tessera as ts  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from patience import patience  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PLACES = [ROOT / "build" / "prefix" / "bin" / "tessera", ROOT / "build" / "release" / "tessera"]
TESSERA = os.environ.get("TESSERA") or next((str(p) for p in PLACES if p.exists()), None) or shutil.which("tessera")

PROGRAM = """
import sys
import numpy as np
import tessera as ts

DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"]

def content(shape, dtype):
    return (np.arange(int(np.prod(shape))) % 100).reshape(shape).astype(dtype)

with ts.init() as comm:
    state = ts.State()
    def whole(name, shape, dtype):
        state[name] = content(shape, dtype)
    def sharded(name, layout, dtype):
        all_of_it = content(layout.shape, dtype)
        pieces = [np.ascontiguousarray(all_of_it[box.slices]) for box in layout.boxes(comm.rank)]
        state[name] = ts.Sharded(layout, pieces, comm.rank, dtype)
    whole("whole.matrix", (100, 30), "float32")
    whole("whole.large", (3000, 500), "float32")
    whole("whole.scalar", (), "int64")
    whole("whole.empty", (0, 4), "float32")
    whole("whole.mask", (7,), "bool")
    for dtype in DTYPES:
        sharded(f"rows.{dtype}", ts.Layout((11, 3), (3,), (ts.Shard(0),)), dtype)
    sharded("columns", ts.Layout((5, 10), (3,), (ts.Shard(1),)), "float32")
    sharded("few", ts.Layout((2,), (3,), (ts.Shard(0),)), "float32")
    boxes = [
        [ts.Box((0, 0), (2, 4)), ts.Box((2, 0), (1, 4))],
        [],
        [ts.Box((3, 0), (2, 2)), ts.Box((3, 2), (2, 2))],
    ]
    sharded("boxes", ts.Layout.from_boxes((5, 4), boxes), "float32")
    with ts.Saver(comm, sys.argv[1]) as saver:
        saver.save(7, state)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert TESSERA is not None, "the tessera command is not built"
    directory = tmp_path_factory.mktemp("hf")
    program = directory / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    root = directory / "checkpoints"
    command = [TESSERA, "run", "-n", "3", sys.executable, str(program), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stdout + done.stderr
    return root / (root / "latest").read_text(encoding="utf-8").strip()


def content(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 100).reshape(shape).astype(dtype)


def poisoned(value: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.empty(value.shape, value.dtype))
    return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(111)


def test_every_tensor_is_loaded_bit_by_bit(checkpoint: Path) -> None:
    with ts.Checkpoint(checkpoint) as ours:
        expected = {name: ours[name] for name in ours}
    assert len(expected) == 16
    for name, value in expected.items():
        assert value.tobytes() == content(value.shape, value.dtype).tobytes(), f"{name}, read by Tessera"
    state = {name: poisoned(value) for name, value in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    for name, value in expected.items():
        assert tuple(state[name].shape) == value.shape, name
        assert state[name].numpy().tobytes() == value.tobytes(), name


@pytest.mark.parametrize("names", [["boxes"], ["whole.large", "columns"], ["whole.scalar", "few"]])
def test_a_part_is_loaded_alone(checkpoint: Path, names: list[str]) -> None:
    with ts.Checkpoint(checkpoint) as ours:
        expected = {name: ours[name] for name in names}
    state = {name: poisoned(value) for name, value in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    for name, value in expected.items():
        assert state[name].numpy().tobytes() == value.tobytes(), name


def test_safetensors_itself_opens_every_file(checkpoint: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    files = sorted(checkpoint.glob("*.safetensors"))
    assert [file.name for file in files] == [
        "rank-00000.1.safetensors",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "rank-00002.1.safetensors",
        "rank-00002.safetensors",
    ]
    for file in files:
        with safetensors.safe_open(str(file), "np") as opened:
            assert len(list(opened.keys())) > 0
            assert opened.metadata()["DCP_VERSION"] == "1.0"
