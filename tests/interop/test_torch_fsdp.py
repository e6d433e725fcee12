"""`tessera.torch.fsdp` trains as PyTorch's own does over Gloo, on the same ranks."""

from __future__ import annotations

import inspect
import operator
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from fork_server import Start
from run_torch import run_ranks
from sampling import sample
from tessera.torch import checkpoint
from tessera.torch import fsdp as ours
from torch.distributed import fsdp as theirs

JOBS = Path(__file__).with_name("torch_fsdp_jobs.py")
WRAPPER_JOBS = Path(__file__).with_name("torch_fsdp1_jobs.py")

CALLS = [
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "UnshardHandle.wait",
    "FullyShardedDataParallel",
]
for name in ("FSDPModule", "FullyShardedDataParallel"):
    members = vars(getattr(theirs, name)).items()
    CALLS += [f"{name}.{of}" for of, value in members if inspect.isroutine(value) and not of.startswith("_")]


@pytest.mark.parametrize("name", CALLS)
def test_signatures_are_pytorchs(name: str) -> None:
    def signature(module: Any) -> list[tuple[str, Any, Any]]:
        thing: Callable[..., Any] = operator.attrgetter(name)(module)
        return [(one.name, one.kind, one.default) for one in inspect.signature(thing).parameters.values()]

    assert signature(ours) == signature(theirs)


def test_losses_gradients_and_states_are_pytorchs(tmp_path: Path) -> None:
    """With every option; and each error is named."""
    run_ranks(JOBS, 2, "checks", tmp_path)


@pytest.mark.slow
def test_so_they_are_where_ranks_have_fewer_rows_or_none(tmp_path: Path) -> None:
    checks = [
        "losses_gradients_and_states",
        "every_way_to_be_whole",
        "gradients_add_up",
        "memory_is_left_after_backward",
        "what_changes_shards_is_seen",
        "checkpoints",
        "whole_by_hand",
        "ranks_that_differ",
        "units_that_are_in_use",
    ]
    run_ranks(JOBS, 3, "checks", tmp_path, *sample(checks, 4, "fully_shard on three ranks"))


def test_replicas_and_two_hosts_train_alike(tmp_path: Path) -> None:
    checks = [
        "losses_gradients_and_states",
        "replicas_hold_the_same_shards",
        "gradients_add_up",
        "memory_is_left_after_backward",
        "what_changes_shards_is_seen",
    ]
    run_ranks(JOBS, 4, "checks", tmp_path, *sample(checks, 2, "fully_shard on two hosts"), hosts=2)


def test_units_kept_among_two_of_four_hosts_train_alike(tmp_path: Path) -> None:
    run_ranks(JOBS, 4, "checks", tmp_path, "every_way_to_be_whole", hosts=4)


def test_memory_left_after_backward_is_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for leaves in ("never", "until the last", "always"):
        records = tmp_path / leaves
        records.mkdir()
        monkeypatch.setenv("TESSERA_TRACE_DIR", str(records))
        run_ranks(JOBS, 2, "adds_up", leaves)
        text = "".join(path.read_text() for path in records.iterdir())
        counts[leaves] = text.count('"chunks of whole parameters"')
    # Two ranks, 4 steps of 3 passes: 4 units for a forward, which is the first of a step where memory is left, and 3
    # for each backward, since the root's stays whole in between.
    assert counts == {"never": 2 * 4 * (3 * 4 + 9), "until the last": 2 * 4 * (4 + 9), "always": 2 * 4 * (4 + 9)}


def test_a_rank_that_dies_in_backward_is_named_to_the_others() -> None:
    run_ranks(JOBS, 3, "dies", ends={2: -signal.SIGKILL}, start=Start.EXECUTE)


def test_a_model_is_loaded_without_a_whole_tensor(tmp_path: Path) -> None:
    rows = torch.arange(4096.0)[:, None]
    weights = {f"{number}.weight": (rows + number).expand(-1, 4096).contiguous() for number in range(2)}
    checkpoint.save({"model": weights}, checkpoint_id=tmp_path / "large", no_dist=True)
    run_ranks(JOBS, 4, "loads_large", tmp_path)


def test_fsdp1_by_its_names(tmp_path: Path) -> None:
    run_ranks(WRAPPER_JOBS, 2, "checks", tmp_path)


@pytest.mark.slow
def test_states_of_fsdp1_where_ranks_have_fewer_rows_or_none(tmp_path: Path) -> None:
    run_ranks(WRAPPER_JOBS, 3, "checks", tmp_path, "states_of_each_kind", "states_of_optimizers", "whole_parameters")


def test_replicas_of_fsdp1(tmp_path: Path) -> None:
    run_ranks(WRAPPER_JOBS, 4, "checks", tmp_path, "replicas_of_shards")


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2)])
def test_fsdp1_checkpoints_at_another_number_of_ranks(tmp_path: Path, saving: int, loading: int) -> None:
    """PyTorch's and Tessera's, each into both."""
    run_ranks(WRAPPER_JOBS, saving, "saves", tmp_path)
    run_ranks(WRAPPER_JOBS, loading, "goes_on", tmp_path)
