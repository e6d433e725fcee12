"""What PyTorch's own tests ask of a CPU backend, asked of the backend "tessera"; docs/TORCH.md has the list."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch_ranks import run_ranks

JOBS = Path(__file__).with_name("torch_c10d_jobs.py")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_backend_does_what_gloos_tests_ask(ranks: int) -> None:
    run_ranks(JOBS, ranks)
