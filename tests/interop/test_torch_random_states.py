"""Random nested states come back from checkpoints as they were, whoever saved them and at whatever number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from patience import patience
from run_torch import run_ranks
from sampling import LONG, SEED

JOBS = Path(__file__).with_name("torch_random_state_jobs.py")
A_BLOCK = 500
# Each run draws others; --long takes the first 10,000.
FIRST = [block * A_BLOCK for block in range(20)] if LONG else [20 * A_BLOCK + int(SEED) % 1_000_000]


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.timeout(patience(1800) if LONG else patience(200))
def test_random_states_come_back(tmp_path: Path, first: int) -> None:
    limit = 1500 if LONG else 5
    told = run_ranks(JOBS, 3, tmp_path, first, limit, A_BLOCK, timeout=patience(limit + 60))
    assert f"seeds {first} to " in told
    if LONG:
        assert f"to {first + A_BLOCK - 1}" in told
