"""The orders of pipeline schedules are PyTorch's, cell by cell, and PyTorch reads our CSV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from conftest import TESSERA
from run_torch import run_python
from sampling import sample

JOBS = Path(__file__).with_name("torch_pipeline_jobs.py")


def cases() -> list[tuple[str, int, int, int]]:
    every = []
    for ranks in range(1, 9):
        for microbatches in range(1, 17):
            for stages in range(1, 5):
                every.append(("looped_bfs", ranks, stages, microbatches))
                if microbatches % max(1, microbatches // ranks) == 0:
                    every.append(("interleaved_1f1b", ranks, stages, microbatches))
                    every.append(("interleaved_zero_bubble", ranks, stages, microbatches))
            every.append(("zbv", ranks, 2, microbatches))
            if microbatches >= 2 * ranks:
                every.append(("dualpipev", ranks, 2, microbatches))
    return every


def test_the_orders_are_those_of_pytorch(tmp_path: Path) -> None:
    drawn = sample(cases(), 300, "pipeline schedules")
    done = run_python(JOBS, TESSERA, json.dumps(drawn), tmp_path)
    assert f"{len(drawn)} schedules are equal" in done.stdout, done.stderr
