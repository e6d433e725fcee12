"""`tessera.torch` trains tensor-parallel slices over ranks with other data as one process trains all of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from run_torch import run_ranks
from tessera.torch import clip_grad_norm_

JOBS = Path(__file__).with_name("torch_slices_jobs.py")


def test_signature_is_pytorchs() -> None:
    def signature(function: Callable[..., object]) -> list[tuple[str, object, object]]:
        return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]

    assert signature(clip_grad_norm_) == signature(torch.nn.utils.clip_grad_norm_)


def test_ddp(tmp_path: Path) -> None:
    """Losses, gradients, norms and checkpoints are those of one process; and each error is named."""
    run_ranks(JOBS, 4, tmp_path, "ddp_over_slices", "ddp_in_other_ways", "ddp_saves_and_loads", "ddp_bad_input")


def test_fully_shard(tmp_path: Path) -> None:
    """The same; and slices lie where PyTorch's `fully_shard` puts them."""
    checks = [
        "fsdp_parts_of_slices",
        "fsdp_over_slices",
        "fsdp_saves_and_loads",
        "fsdp_in_other_ways",
        "tied_weights_and_loss_parallel",
        "fsdp_without_values_until_later",
        "fsdp_with_replicas",
        "norms_of_mixed_parameters",
        "fsdp_of_whole_states",
        "fsdp_bad_input",
    ]
    run_ranks(JOBS, 4, tmp_path, *checks)


def test_replicas_by_shards_by_slices(tmp_path: Path) -> None:
    """With two of each."""
    run_ranks(JOBS, 8, tmp_path, "fsdp_with_replicas")
