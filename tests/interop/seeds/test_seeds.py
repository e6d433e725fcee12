"""The programs of the source documents, as far as checkpoints go: README.md beside this file tells what differs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import dcp_load_plain  # noqa: E402
import tessera as ts  # noqa: E402
import tessera.torch.checkpoint as tcp  # noqa: E402
from fork_server import Start  # noqa: E402
from observe import loss_of  # noqa: E402
from run_torch import run_python, run_ranks, run_spawner  # noqa: E402
from sampling import sample  # noqa: E402

HERE = Path(__file__).resolve().parent
ASYNCHRONOUS = [(program, ranks) for program in ("async_dcp", "async_dcp_cached") for ranks in (2, 4)]
pytestmark = pytest.mark.slow


def as_it_is(program: str, ranks: int, directory: Path, start: Start = Start.FORK) -> str:
    done = run_spawner(HERE / f"{program}.py", ranks, cwd=directory, start=start)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def watched(program: str, ranks: int, directory: Path) -> list[Any]:
    """What the program held at its places of interest, whole."""
    output = directory / f"{program}.pt"
    run_ranks(HERE / "observe.py", ranks, program, output, cwd=directory)
    return list(torch.load(output, weights_only=False))


def assert_same(want: Any, got: Any, name: str = "") -> None:
    if isinstance(want, dict):
        assert want.keys() == got.keys(), name
        for key in want:
            assert_same(want[key], got[key], f"{name}.{key}")
    else:
        assert torch.equal(want, got), (name, want, got)


def rank_files(directory: Path) -> list[str]:
    (save,) = directory.glob("step-*")
    assert (save / "manifest.json").exists()
    return sorted(path.name for path in save.glob("rank-*"))


@pytest.mark.parametrize(("saving", "loading"), sample([(2, 2), (2, 4), (4, 2)], 1, "getting started"))
def test_getting_started(tmp_path: Path, saving: int, loading: int) -> None:
    (saved,) = watched("dcp_save", saving, tmp_path)
    # "You should see 8 checkpoint files", of 8 devices.
    assert rank_files(tmp_path / "checkpoint") == [f"rank-{rank:05}.safetensors" for rank in range(saving)]
    (loaded,) = watched("dcp_load", loading, tmp_path)
    assert saved["model"].keys() == {"net1.weight", "net1.bias", "net2.weight", "net2.bias"}
    assert_same(saved["model"], loaded["model"])
    assert saved["optim"].keys() == saved["model"].keys()
    assert_same(saved["optim"], loaded["optim"])
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=1e-5)
    with contextlib.chdir(tmp_path):
        model = dcp_load_plain.run_checkpoint_load_example()
    assert_same(saved["model"], dict(model.state_dict()))
    assert loss_of(model) == pytest.approx(saved["loss"], rel=1e-5)


@pytest.mark.parametrize("ranks", sample([2, 4], 1, "getting started as it is"))
def test_getting_started_as_it_is(tmp_path: Path, ranks: int) -> None:
    assert f"example on {ranks} devices" in as_it_is("dcp_save", ranks, tmp_path, Start.EXECUTE)
    assert len(rank_files(tmp_path / "checkpoint")) == ranks
    as_it_is("dcp_load", ranks, tmp_path)
    done = run_python(HERE / "dcp_load_plain.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", sample([2, 4], 1, "fsdp_checkpoint"))
def test_fsdp_checkpoint(tmp_path: Path, ranks: int) -> None:
    (first, before), (second, after) = watched("fsdp_checkpoint", ranks, tmp_path)
    assert (first, second) == ("Before loading", "After loading")
    for rank in range(ranks):
        (model_1, optim_1, loss_1), (model_2, _, loss_2) = before[rank]
        assert not torch.equal(model_1["weight"], model_2["weight"])
        assert loss_1 != loss_2
        (same_1, same_optim_1, same_loss_1), (loaded_2, loaded_optim_2, loaded_loss_2) = after[rank]
        assert_same(model_1, same_1)
        assert_same(optim_1, same_optim_1)
        assert_same(model_1, loaded_2)
        assert_same(optim_1, loaded_optim_2)
        assert loss_1 == same_loss_1 == loaded_loss_2
        plain = torch.nn.Linear(4, 4)
        plain.load_state_dict(loaded_2)
        assert loss_of(plain, features=4) == pytest.approx(loss_1, rel=1e-5)
    assert any(not torch.equal(of_rank[0][1]["exp_avg"], of_rank[1][1]["exp_avg"]) for of_rank in before)
    assert rank_files(tmp_path / "checkpoint") == [f"rank-{rank:05}.safetensors" for rank in range(ranks)]
    with ts.Checkpoint(tmp_path / "checkpoint") as ours:
        assert ours["model.weight"].tolist() == after[0][0][0]["weight"].tolist()
        assert ours.tensors["optim.state.weight.exp_avg"].shape == (4, 4)
    printed = as_it_is("fsdp_checkpoint", ranks, tmp_path)
    assert printed.count("After loading --- rank:") == 2 * ranks


@pytest.mark.parametrize(("program", "ranks"), sample(ASYNCHRONOUS, 2, "asynchronous saves"))
def test_asynchronous_saves(tmp_path: Path, program: str, ranks: int) -> None:
    at_each_save = watched(program, ranks, tmp_path)
    assert len(at_each_save) == 10
    losses = []
    for step, saved in enumerate(at_each_save):
        directory = tmp_path / f"checkpoint_step{step}"
        assert rank_files(directory) == [f"rank-{rank:05}.safetensors" for rank in range(ranks)]
        model = dcp_load_plain.ToyModel()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        app = {"app": Loaded(model, optimizer)}
        tcp.load(app, checkpoint_id=directory)
        assert_same(saved["model"], dict(model.state_dict()), str(step))
        moments = tcp.get_optimizer_state_dict(model, optimizer)["state"]
        assert_same(saved["optim"], moments, str(step))
        assert loss_of(model) == pytest.approx(saved["loss"], rel=1e-5)
        losses.append(saved["loss"])
    assert len(set(losses)) == 10
    assert losses[-1] < losses[0]  # the sum of the outputs, of inputs like those of the program, is made small


@pytest.mark.parametrize(("program", "ranks"), sample(ASYNCHRONOUS, 2, "asynchronous saves"))
def test_asynchronous_saves_as_they_are(tmp_path: Path, program: str, ranks: int) -> None:
    as_it_is(program, ranks, tmp_path)
    for step in range(10):  # the last one too, for which the program does not wait
        with ts.Checkpoint(tmp_path / f"checkpoint_step{step}") as ours:
            ours.verify()
            assert ours.manifest["world_size"] == ranks


class Loaded:
    """A plain model and its optimizer, as the program's AppState has them."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = tcp.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tcp.set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )
