"""`tessera.torch.checkpoint` over ranks: plain, DDP, FSDP2, tensor-parallel and 2-D models with AdamW, from any world
size to any other: by our functions, by PyTorch's with our storage classes, and by an unmodified PyTorch.

The ranks' side is torch_checkpoint_jobs.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

import tessera as ts  # noqa: E402
import tessera.torch.checkpoint as tcp  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from conftest import TESSERA  # noqa: E402
from patience import patience  # noqa: E402
from run_torch import run_ranks  # noqa: E402
from sampling import sample  # noqa: E402

JOBS = Path(__file__).resolve().parent / "torch_checkpoint_jobs.py"
SAVED = {"plain": 1, "ddp": 2, "fsdp": 3, "hsdp": 4, "tp": 2, "mesh": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {kind: tmp_path_factory.mktemp(kind) for kind in SAVED}
    for kind, ranks in SAVED.items():
        run_ranks(JOBS, ranks, "save", kind, directories[kind])
    return directories


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "sources"),
    sample(
        [
            ("plain", 1, list(SAVED)),
            ("ddp", 3, ["plain", "mesh"]),
            ("fsdp", 2, ["plain", "ddp", "fsdp", "tp", "mesh"]),
            ("mesh", 4, ["fsdp", "hsdp", "mesh"]),
            ("tp", 2, ["fsdp", "mesh"]),
            ("hsdp", 4, ["tp", "ddp"]),
        ],
        3,
        "loads in other layouts",
    ),
)
def test_every_save_loads_in_other_layouts_and_world_sizes(
    saved: dict[str, Path], kind: str, ranks: int, sources: list[str]
) -> None:
    run_ranks(JOBS, ranks, "load", kind, *(saved[source] for source in sources))


def test_a_sharded_state_is_read_whole_without_ranks(saved: dict[str, Path]) -> None:
    """By Tessera alone, as any language would; only FSDP's three ranks together hold it."""
    want = torch.load(saved["fsdp"] / "whole.pt", weights_only=False)
    for form in ("tessera", "torch_dcp"):
        for way in ("own", "plugin", "cached" if form == "tessera" else "async"):
            with ts.Checkpoint(saved["fsdp"] / f"{way}-{form}") as ours:
                weight = want["app"]["model"]["embedding.weight"]
                assert ours["app.model.embedding.weight"].tobytes() == weight.numpy().tobytes()
                moment = want["app"]["optim"]["state"]["up.weight"]["exp_avg"]
                assert ours["app.optim.state.up.weight.exp_avg"].tobytes() == moment.numpy().tobytes()
                if form == "tessera":
                    assert ours.manifest["world_size"] == 3
                assert ours.saved_values["step"] == 7


def test_the_ranks_share_the_writing(saved: dict[str, Path]) -> None:
    """Each rank writes one file, and what is sharded lies in it once."""
    for way in ("own", "plugin"):
        (save,) = (saved["fsdp"] / f"{way}-tessera").glob("step-*")
        files = sorted(path.name for path in save.glob("rank-*"))
        assert files == [f"rank-{rank:05}.safetensors" for rank in range(3)]
    whole = torch.load(saved["fsdp"] / "whole.pt", weights_only=False)
    model = whole["app"]["model"]
    with ts.Checkpoint(saved["fsdp"] / "own-tessera") as ours:
        assert {name for name in ours if name.startswith("app.model.")} == {f"app.model.{name}" for name in model}


@pytest.mark.parametrize("kind", SAVED)
def test_the_command_line_verifies_every_save(saved: dict[str, Path], kind: str) -> None:
    for checkpoint in sorted(path for path in saved[kind].iterdir() if path.is_dir()):
        done = subprocess.run(
            [str(TESSERA), "ckpt", "verify", str(checkpoint)], capture_output=True, text=True, timeout=patience(60)
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_errors_reach_every_rank(tmp_path: Path) -> None:
    run_ranks(JOBS, 2, "errors", tmp_path)


def test_any_rank_may_coordinate(tmp_path: Path) -> None:
    run_ranks(JOBS, 2, "coordinators", tmp_path)


def test_ranks_may_hold_different_names(tmp_path: Path) -> None:
    run_ranks(JOBS, 4, "stages", tmp_path)
    for way in ("stages", "planned"):
        for form in ("tessera", "torch_dcp"):
            with ts.Checkpoint(tmp_path / f"{way}-{form}") as ours:
                expected: dict[str, Any] = {f"stage{k}": [k * 10.0 + i for i in range(5)] for k in range(2)}
                expected |= {f"rank{k}": [float(k)] * 2 for k in range(4)}
                expected |= {"shared": [1, 1]}
                assert {name: ours[name].tolist() for name in ours} == expected
                values = {name: value for name, value in ours.saved_values.items() if name.startswith("note")}
                assert values == {f"note{k}": k for k in range(4)}
            got = {name: torch.zeros(len(value)) for name, value in expected.items()}
            tcp.load(got, checkpoint_id=tmp_path / f"{way}-{form}")
            assert {name: value.tolist() for name, value in got.items()} == expected
            if form == "torch_dcp":
                got = {name: torch.zeros(len(value)) for name, value in expected.items()}
                dcp.load(got, checkpoint_id=tmp_path / f"{way}-{form}")
                assert {name: value.tolist() for name, value in got.items()} == expected
    for rank in range(4):
        with ts.Checkpoint(tmp_path / f"alone{rank}") as ours:
            assert ours["x"].tolist() == [rank]
            assert ours.manifest["world_size"] == 1


def test_ranks_that_hold_different_names_exchange_tables_and_no_data(tmp_path: Path) -> None:
    run_ranks(JOBS, 2, "tables", tmp_path)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_a_host_read_each_byte_once(tmp_path: Path, ranks: int) -> None:
    run_ranks(JOBS, ranks, "once", tmp_path)


@pytest.mark.slow
def test_pytorchs_processes_and_stagers_save_through_us(tmp_path: Path) -> None:
    run_ranks(JOBS, 2, "elsewhere", tmp_path)
    got = {"x": torch.zeros(3), "y": torch.zeros(7, 3)}
    dcp.load(got, checkpoint_id=tmp_path / "process", no_dist=True)
    assert got["x"].tolist() == [1, 1, 1]
    assert torch.equal(got["y"], torch.arange(21.0).reshape(7, 3))


def test_ranks_on_several_hosts_meet(tmp_path: Path) -> None:
    run_ranks(JOBS, 2, "hosts", tmp_path, hosts=2)


COMM = """
import sys
import tessera as ts
import tessera.torch.checkpoint as tcp
import torch

# No torch.distributed at all: the ranks are those of `tessera run`.
with ts.init() as comm:
    state = {"x": torch.arange(6.0), "n": 3}
    tcp.save(state, checkpoint_id=sys.argv[1], process_group=comm)
    future = tcp.async_save({**state, "n": 4}, checkpoint_id=sys.argv[1], process_group=comm)
    future.result(timeout=60)
    got = {"x": torch.zeros(6), "n": 0}
    tcp.load(got, checkpoint_id=sys.argv[1], process_group=comm)
    assert got["n"] == 4 and got["x"].tolist() == [0, 1, 2, 3, 4, 5], got
"""


def test_the_ranks_may_be_tesseras_own(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(COMM, encoding="utf-8")
    command = [str(TESSERA), "run", "-n", "2", sys.executable, str(tmp_path / "job.py"), str(tmp_path / "checkpoint")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stdout + done.stderr
    with ts.Checkpoint(tmp_path / "checkpoint") as ours:
        assert ours.manifest["world_size"] == 2
        assert ours.saved_values["n"] == 4
