"""examples/python/gpt.py: a small one learns, goes on at another number of ranks, and writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import tessera as ts
from conftest import ROOT
from patience import patience
from programs import TESSERA
from run_torch import run_ranks

sys.path.insert(0, str(ROOT / "examples" / "python"))

SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 12, "lr": 0.01, "sample": 40, "save-every": 10}
BEGIN = "def "  # what it is given to go on from


PROGRAM = ROOT / "examples" / "python" / "gpt.py"


def options(steps: int, *more: str) -> list[str]:
    small = [word for option, value in SMALL.items() for word in (f"--{option}", str(value))]
    return ["--steps", str(steps), *small, *more]


def run(ranks: int, steps: int, directory: Path, *more: str) -> str:
    return run_ranks(PROGRAM, ranks, *options(steps, *more), cwd=directory)


def launch(ranks: int, steps: int, directory: Path) -> str:
    """As the page says."""
    command = [str(TESSERA), "run", "-n", str(ranks), sys.executable, str(PROGRAM), *options(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(240), cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(directory: Path) -> list[float]:
    with ts.Checkpoint(directory / "gpt-checkpoint") as checkpoint:
        saved: dict[str, Any] = checkpoint.saved_values
    assert saved["progress.step"] == 30
    assert len(saved["progress.losses"]) == 30
    return list(saved["progress.losses"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank."""
    directory = tmp_path_factory.mktemp("alone")
    assert "1 ranks, from the beginning" in run(1, 30, directory)
    return losses(directory)


def test_it_goes_on_in_another_way_on_the_same_curve(tmp_path: Path, expected: list[float]) -> None:
    assert "2 ranks, from the beginning" in run(2, 10, tmp_path, "--parallel", "pp")
    assert "4 ranks, resumed after step 10" in run(4, 20, tmp_path, "--parallel", "fsdp+tp")
    output = run(2, 30, tmp_path, "--parallel", "pp")
    assert "2 ranks, resumed after step 20" in output
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-3)
    assert output.partition("--- it writes:\n")[2].startswith(BEGIN)


def test_it_goes_on_at_another_number_of_ranks_on_the_same_curve(tmp_path: Path, expected: list[float]) -> None:
    assert "2 ranks, from the beginning" in launch(2, 15, tmp_path)
    output = run(3, 30, tmp_path)
    assert "3 ranks, resumed after step 15" in output
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < 0.8 * expected[0]
    wrote = output.partition("--- it writes:\n")[2]
    assert wrote.startswith(BEGIN)
    assert len(wrote) > len(BEGIN) + SMALL["sample"] / 2, output
    assert "<polyline" in (tmp_path / "gpt-loss.svg").read_text(encoding="utf-8")
    assert "step 30/30" in run(2, 30, tmp_path, "--bf16", "--checkpoint", "narrow")


def test_by_itself_it_has_six_layers_and_10_8_million_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of it; all other tests make it smaller."""
    import gpt

    made: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["gpt.py"])
    monkeypatch.setattr(gpt.dist, "init_process_group", lambda *_: None)
    monkeypatch.setattr(gpt.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(gpt.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(gpt, "train", made.append)
    gpt.main()
    (options,) = made
    model = gpt.GPT(options.layers, options.width, options.heads, options.context)
    assert len(model.blocks) == 6
    assert sum(parameter.numel() for parameter in model.parameters()) == 10_785_792
    text = gpt.torch.zeros(1, options.context, dtype=gpt.torch.int64)
    with gpt.torch.no_grad():
        assert model(text).shape == (1, options.context, gpt.CHARACTERS)
