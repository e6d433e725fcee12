"""Random modules, used in random ways, have the gradients of a whole copy, at every step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from patience import patience
from run_torch import run_ranks
from sampling import LONG, SEED

JOBS = Path(__file__).with_name("torch_graph_jobs.py")
SECONDS = 8
A_BLOCK = 500
# Each run draws others; --long takes the first 10,000.
FIRST = [block * A_BLOCK for block in range(20)] if LONG else [20 * A_BLOCK + int(SEED) % 1_000_000]


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("kind", ["fully_shard", "ddp"])
@pytest.mark.timeout(patience(1800) if LONG else patience(300))
def test_gradients_are_those_of_a_whole_copy(kind: str, first: int) -> None:
    limit = 1500 if LONG else SECONDS
    told = run_ranks(JOBS, 2 + first // A_BLOCK % 2, kind, first, limit, A_BLOCK, timeout=patience(limit + 60))
    assert f"seeds {first} to " in told
    if kind == "fully_shard":
        assert "PyTorch's differs in 0 of" in told
    if LONG:
        assert f"to {first + A_BLOCK - 1};" in told
