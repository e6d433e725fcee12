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
from programs import TESSERA

SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 12, "lr": 0.01, "sample": 40, "save-every": 10}


def run(ranks: int, steps: int, directory: Path, *more: str) -> str:
    small = [word for option, value in SMALL.items() for word in (f"--{option}", str(value))]
    program = [sys.executable, str(ROOT / "examples" / "python" / "gpt.py"), "--steps", str(steps), *small, *more]
    done = subprocess.run(
        [str(TESSERA), "run", "-n", str(ranks), *program], capture_output=True, text=True, timeout=240, cwd=directory
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(directory: Path) -> list[float]:
    with ts.Checkpoint(directory / "gpt-checkpoint") as checkpoint:
        saved: dict[str, Any] = checkpoint.saved_values
    assert saved["progress.step"] == 30
    assert len(saved["progress.losses"]) == 30
    return list(saved["progress.losses"])


def test_it_goes_on_at_another_number_of_ranks_on_the_same_curve(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = run(1, 30, tmp_path / "alone")
    assert "1 ranks, from the beginning" in alone
    assert "2 ranks, from the beginning" in run(2, 15, tmp_path)
    output = run(3, 30, tmp_path)
    assert "3 ranks, resumed after step 15" in output
    expected = losses(tmp_path / "alone")
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < 0.8 * expected[0]
    assert "--- it writes:" in output
    assert "def " in output
    assert "<polyline" in (tmp_path / "gpt-loss.svg").read_text(encoding="utf-8")
    assert "step 30/30" in run(2, 30, tmp_path, "--bf16", "--checkpoint", "narrow")
