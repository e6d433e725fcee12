"""The backend "tessera" of torch.distributed: what it computes is what Gloo computes, on the same ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from fork_server import Start
from run_torch import run_ranks

JOBS = Path(__file__).with_name("torch_backend_jobs.py")


def test_collectives_are_gloos_between_three_ranks() -> None:
    """Also asynchronous ones, sends and receives, groups, refusals, disagreements and timeouts."""
    run_ranks(JOBS, 3, "collectives")


def test_collectives_are_gloos_between_two_hosts() -> None:
    run_ranks(JOBS, 2, "collectives", hosts=2)


def test_ddp_fsdp_and_dtensor_train_as_over_gloo(tmp_path: Path) -> None:
    run_ranks(JOBS, 4, "training", tmp_path)


def test_a_rank_that_dies_is_named_to_the_others() -> None:
    run_ranks(JOBS, 3, "dies", ends={2: -signal.SIGKILL})


def test_processes_end_though_nothing_was_destroyed() -> None:
    before = set(os.listdir("/dev/shm"))
    run_ranks(JOBS, 3, "leaves", start=Start.EXECUTE)
    assert not {name for name in os.listdir("/dev/shm") if "tessera" in name} - before
