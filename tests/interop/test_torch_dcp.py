"""PyTorch's Distributed Checkpoint and torch.save files, both ways, bit by bit, with an unmodified PyTorch.

PyTorch writes under DDP, FSDP2, tensor parallel and a 2-D mesh; Tessera reads it whole, and sharded on 1, 2 and 3
ranks.
Tessera writes from 1 and 3 ranks; PyTorch reads it whole, sharded, and converted by its own tool.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import tessera as ts  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from conftest import ROOT, TESSERA  # noqa: E402
from fork_server import Start  # noqa: E402
from patience import patience  # noqa: E402
from run_torch import run_ranks, run_spawner  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch_ranks import bits  # noqa: E402

HERE = Path(__file__).resolve().parent
JOBS = {"plain": 1, "ddp": 2, "fsdp": 2, "mesh": 4}


def run_torch(job: str, ranks: int, directory: Path) -> None:
    start = Start.EXECUTE if job == "ddp" else Start.FORK
    run_ranks(HERE / "torch_jobs.py", ranks, job, directory, start=start)


@pytest.fixture(scope="module", params=list(JOBS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(str(request.param))
    run_torch(str(request.param), JOBS[str(request.param)], directory)
    return directory


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Names as PyTorch's DCP makes them."""
    begin = f"{name}." if name else ""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{begin}{key}").items()}
    if isinstance(value, list) and any(isinstance(item, (dict, list, torch.Tensor)) for item in value):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{begin}{i}").items()}
    return {name: value}


def expected_of(directory: Path) -> dict[str, Any]:
    return flat(torch.load(directory / "whole.pt", weights_only=False))


def is_read(value: Any) -> bool:
    return not isinstance(value, Path)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/.metadata", "whole.pt"])
def test_what_pytorch_writes_is_read_bit_by_bit(saved: Path, name: str) -> None:
    expected = expected_of(saved)
    with ts.Checkpoint(saved / name) as ours:
        tensors = {n: v for n, v in expected.items() if isinstance(v, torch.Tensor) and is_read(v)}
        assert sorted(ours) == sorted(tensors)
        for n, value in tensors.items():
            got = ours[n]
            assert got.shape == tuple(value.shape), n
            assert got.tobytes() == bits(value), n
        values = {n: v for n, v in expected.items() if not isinstance(v, torch.Tensor) and is_read(v)}
        got_values = {n: v for n, v in ours.saved_values.items() if v != {}}
        assert got_values == values
        for n, value in values.items():
            assert type(got_values[n]) is type(value), n
        assert sorted(ours.unreadable) == sorted(n for n, v in expected.items() if not is_read(v))
        assert ours.step == -1


def test_what_is_not_read_says_why(tmp_path: Path) -> None:
    unknown = torch.zeros(2).to(torch.float8_e4m3fnuz)
    torch.save({"a": unknown, "b": {1, 2}, "c": torch.ones(1).to_sparse()}, tmp_path / "x.pt")
    with ts.Checkpoint(tmp_path / "x.pt") as ours:
        assert "torch.float8_e4m3fnuz" in ours.unreadable["a"]
        assert "set is not plain data" in ours.unreadable["b"]
        assert "sparse" in ours.unreadable["c"]
        with pytest.raises(ts.Unsupported, match="float8_e4m3fnuz"):
            ours.read("a", np.zeros(2, "float32"))


def test_nothing_is_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    torch.save({"good": torch.ones(2), "bad": Hostile()}, tmp_path / "x.pt")
    with ts.Checkpoint(tmp_path / "x.pt") as ours:
        assert ours["good"].tolist() == [1, 1]
        assert "system" in ours.unreadable["bad"]
    directory = tmp_path / "dcp"
    dcp.save({"good": torch.ones(2), "bad": Hostile()}, checkpoint_id=directory, no_dist=True)
    with ts.Checkpoint(directory) as ours:
        assert ours["good"].tolist() == [1, 1]
        assert "system" in ours.unreadable["bad"]
    (directory / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ts.Corrupt, match="system"):
        ts.Checkpoint(directory)
    assert not (tmp_path / "executed").exists()


LOADER = """
import sys
import numpy as np
import tessera as ts

# Every tensor cut over the ranks along its longest dimension; what each rank got goes to a file of its own.
with ts.init() as comm, ts.Checkpoint(sys.argv[1]) as checkpoint:
    state, pieces = ts.State(), {}
    for name, info in checkpoint.tensors.items():
        if not info.shape or 0 in info.shape:
            pieces[name] = [np.empty(info.shape, info.dtype.numpy)]
            state[name] = pieces[name][0]
            continue
        dim = int(np.argmax(info.shape))
        layout = ts.Layout(info.shape, (comm.world_size,), (ts.Shard(dim),))
        pieces[name] = [np.empty(box.sizes, info.dtype.numpy) for box in layout.boxes(comm.rank)]
        state[name] = ts.Sharded(layout, pieces[name], comm.rank, info.dtype)
    checkpoint.load(state, allow_unexpected=True)
    np.savez(f"{sys.argv[2]}/{comm.rank}.npz", **{
        f"{name}/{i}": piece.view(np.uint8) if piece.ndim else piece.reshape(1).view(np.uint8)
        for name, list_of in pieces.items() for i, piece in enumerate(list_of)})
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_loads_its_shards(saved: Path, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "loader.py").write_text(LOADER, encoding="utf-8")
    command = [str(TESSERA), "run", "-n", str(ranks), sys.executable, str(tmp_path / "loader.py")]
    done = subprocess.run(
        [*command, str(saved / "checkpoint"), str(tmp_path)], capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = [np.load(tmp_path / f"{rank}.npz") for rank in range(ranks)]
    for name, value in expected_of(saved).items():
        if not isinstance(value, torch.Tensor) or not is_read(value):
            continue
        if value.dim() == 0 or value.numel() == 0:
            for one in loaded:
                assert one[f"{name}/0"].tobytes() == bits(value), name
            continue
        dim = int(np.argmax(value.shape))
        for rank, chunk in enumerate(torch.chunk(value.detach(), ranks, dim)):
            assert loaded[rank][f"{name}/0"].tobytes() == bits(chunk), (name, rank)


# --- the other way ---

WRITER = """
import sys
import ml_dtypes
import numpy as np
import tessera as ts

def content(shape, dtype):
    return (np.arange(int(np.prod(shape))) % 100).reshape(shape).astype(dtype)

with ts.init() as comm:
    state = ts.State()
    for dtype in ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"]:
        layout = ts.Layout((11, 3), (comm.world_size,), (ts.Shard(0),))
        pieces = [np.ascontiguousarray(content((11, 3), dtype)[box.slices]) for box in layout.boxes(comm.rank)]
        state[f"rows.{dtype}"] = ts.Sharded(layout, pieces, comm.rank, dtype)
    state["brain"] = content((5, 7), ml_dtypes.bfloat16)
    state["mask"] = np.array([True, False, True])
    state["scalar"] = content((), "int64")
    state["empty"] = content((0, 4), "float32")
    state["large"] = content((3000, 500), "float32")
    tied = content((9, 4), "float32")
    state["tied.a"] = tied
    state["tied.b"] = tied
    layout = ts.Layout((5, 10), (comm.world_size,), (ts.Shard(1),))
    pieces = [np.ascontiguousarray(content((5, 10), "float32")[box.slices]) for box in layout.boxes(comm.rank)]
    state["columns"] = ts.Sharded(layout, pieces, comm.rank, "float32")
    state["note"] = "größer"
    state["config"] = {"lr": 0.5, "betas": (0.9, 0.99), "layers": [1, 2], "blob": b"\\x00\\xff", "big": 2**80,
                              "stages": [{"at": 1}, {"at": -(2**40)}], "nothing": None}
    with ts.Saver(comm, sys.argv[1], format="torch_dcp", keep_latest=2) as saver:
        saver.save(1, state)
        saver.save_async(2, state).wait()
        saver.save(7, state)
"""
DCP_CLASSES = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
]
VALUES = {
    "note": "größer",
    "config.lr": 0.5,
    "config.betas": (0.9, 0.99),
    "config.layers": [1, 2],
    "config.blob": b"\x00\xff",
    "config.big": 2**80,
    "config.stages.0.at": 1,
    "config.stages.1.at": -(2**40),
    "config.nothing": None,
}


@pytest.fixture(scope="module", params=[1, 3])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("written")
    (directory / "writer.py").write_text(WRITER, encoding="utf-8")
    root = directory / "root"
    command = [str(TESSERA), "run", "-n", str(request.param), sys.executable, str(directory / "writer.py"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def save_of(root: Path) -> Path:
    return root / (root / "latest").read_text(encoding="utf-8").strip()


def content(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 100).reshape(shape).astype(dtype)


def expected_tensors() -> dict[str, np.ndarray]:
    numbers = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"]
    return {
        **{f"rows.{dtype}": content((11, 3), dtype) for dtype in numbers},
        "brain": content((5, 7), ml_dtypes.bfloat16),
        "mask": np.array([True, False, True]),
        "scalar": content((), "int64"),
        "empty": content((0, 4), "float32"),
        "large": content((3000, 500), "float32"),
        "tied.a": content((9, 4), "float32"),
        "tied.b": content((9, 4), "float32"),
        "columns": content((5, 10), "float32"),
    }


def test_pytorch_loads_what_tessera_writes(written: Path) -> None:
    directory = save_of(written)
    metadata = dcp.FileSystemReader(directory).read_metadata()
    expected = expected_tensors()
    assert sorted(metadata.state_dict_metadata) == sorted([*expected, *VALUES])
    state: dict[str, Any] = {
        name: torch.zeros(
            metadata.state_dict_metadata[name].size, dtype=metadata.state_dict_metadata[name].properties.dtype
        )
        for name in expected
    }
    state |= dict.fromkeys(VALUES)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    for name, value in expected.items():
        assert tuple(state[name].shape) == value.shape, name
        assert bits(state[name]) == value.tobytes(), name
    for name, value in VALUES.items():
        assert state[name] == value, name
        assert type(state[name]) is type(value), name


def test_pytorch_finds_values_where_its_users_nest_them(written: Path) -> None:
    state: dict[str, Any] = {
        "config": {"lr": 0.0, "stages": [{"at": 0}, {"at": 0}]},
        "rows": {"int8": torch.zeros(11, 3).to(torch.int8)},
    }
    dcp.load(state, checkpoint_id=save_of(written), no_dist=True)
    assert state["config"] == {"lr": 0.5, "stages": [{"at": 1}, {"at": -(2**40)}]}
    assert bits(state["rows"]["int8"]) == expected_tensors()["rows.int8"].tobytes()


def test_pytorchs_converter_takes_what_tessera_writes(written: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(save_of(written), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for name, value in expected_tensors().items():
        assert bits(whole[name]) == value.tobytes(), name
    with ts.Checkpoint(tmp_path / "whole.pt") as ours:
        assert sorted(ours) == sorted(expected_tensors())


def test_every_archive_is_one_of_torch_save(written: Path) -> None:
    """torch.load with weights_only, item by item."""
    directory = save_of(written)
    metadata = dcp.FileSystemReader(directory).read_metadata()
    for index, info in metadata.storage_data.items():
        data = (directory / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        if index.fqn in VALUES:
            assert loaded == VALUES[index.fqn], index.fqn
        else:
            assert isinstance(loaded, torch.Tensor), index.fqn


def test_only_classes_of_pytorch_2_4_are_named(written: Path) -> None:
    metadata = (save_of(written) / ".metadata").read_bytes()
    named = {(code.name, argument) for code, argument, _ in pickletools.genops(metadata) if "GLOBAL" in code.name}
    dtypes = {str(torch.as_tensor(value).dtype) for value in expected_tensors().values() if value.dtype.kind != "V"}
    module = "torch.distributed.checkpoint.metadata"
    classes = {f"{module} {name}" for name in DCP_CLASSES}
    others = {"torch Size", "torch.serialization _get_layout", "torch.distributed.checkpoint.filesystem _StorageInfo"}
    dtypes = {name.replace(".", " ") for name in dtypes | {"torch.bfloat16"}}
    assert named == {("GLOBAL", name) for name in classes | others | dtypes}


def test_the_scripts_that_ask_an_old_pytorch_work_with_this_one(tmp_path: Path) -> None:
    """What was found out with old ones is in docs/FORMAT.md."""
    job = "fsdp"
    golden = ROOT / "tests" / "golden" / "torch_dcp"

    def run(script: str, *arguments: object, start: Start = Start.FORK) -> str:
        done = run_spawner(golden / script, *arguments, start=start)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    version = torch.__version__.split("+")[0]
    run("make.py", "--into", tmp_path, job, start=Start.EXECUTE)
    committed = golden / version / job / "expected.json"
    assert (tmp_path / version / job / "expected.json").read_bytes() == committed.read_bytes()
    run("write_ours.py", tmp_path / "ours", job)
    said = run("read_ours.py", tmp_path / "ours", job)
    assert [f"{job}, {kind}: read" in said for kind in ("saver", "exported", "torch")] == [True] * 3, said


def test_tessera_reads_its_own_again(written: Path) -> None:
    with ts.Checkpoint(written) as ours:
        assert ours.step == 7
        expected = expected_tensors()
        assert sorted(ours) == sorted(expected)
        for name, value in expected.items():
            assert ours[name].tobytes() == value.tobytes(), name
        assert ours.saved_values["config"]["big"] == 2**80
        assert ours.saved_values["config"]["betas"] == (0.9, 0.99)
    done = subprocess.run(
        [str(TESSERA), "ckpt", "verify", str(written)], capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    saves = [path.name[:13] for path in sorted(written.iterdir()) if path.name.startswith("step-")]
    assert saves == ["step-00000002", "step-00000007"]


def test_a_resume_takes_a_save_in_either_format(tmp_path: Path) -> None:
    for step, form in [(1, "tessera"), (2, "torch_dcp"), (3, "tessera")]:
        array = np.full(6, step - 1.0) if step == 1 else np.full(6, -1.0)
        state = ts.State()
        state["x"] = array
        state["v"] = [1, (2,)]
        with ts.Saver(None, tmp_path, format=form) as saver:
            assert saver.resume(state) == step - 1
            assert array.tolist() == [step - 1.0] * 6
            array += 1
            saver.save(step, state)
    with pytest.raises(ts.InvalidArgument, match="'pickle'"):
        ts.Saver(None, tmp_path, format="pickle")
