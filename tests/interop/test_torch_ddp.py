"""`tessera.torch.DistributedDataParallel` trains as PyTorch's own does over Gloo, on the same ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fork_server import Start
from run_torch import run_ranks

JOBS = Path(__file__).with_name("torch_ddp_jobs.py")


def test_losses_gradients_and_states_are_pytorchs_between_two_ranks(tmp_path: Path) -> None:
    """With every option; and each error is named."""
    run_ranks(JOBS, 2, "checks", tmp_path)


@pytest.mark.slow
def test_losses_gradients_and_states_are_pytorchs_between_four_ranks(tmp_path: Path) -> None:
    run_ranks(JOBS, 4, "checks", tmp_path)


def test_losses_and_gradients_are_pytorchs_between_two_hosts(tmp_path: Path) -> None:
    checks = ["losses_and_gradients", "sparse_gradients", "buckets_in_the_order_of_use", "several_models"]
    run_ranks(JOBS, 3, "checks", tmp_path, *checks, hosts=2)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_is_late_for_backward_is_named_at_the_deadline(hosts: int) -> None:
    run_ranks(JOBS, 3, "late", hosts=hosts)


def test_a_rank_that_dies_in_backward_is_named_to_the_others() -> None:
    run_ranks(JOBS, 3, "dies", ends={2: -signal.SIGKILL}, start=Start.EXECUTE)
