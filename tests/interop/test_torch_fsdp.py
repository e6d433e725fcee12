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
import torch.distributed.checkpoint as dcp
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
        "parameters_are_cut_along_any_dimension",
    ]
    run_ranks(JOBS, 3, "checks", tmp_path, *sample(checks, 4, "fully_shard on three ranks"))


def test_parameters_cut_by_columns_train_as_pytorchs(tmp_path: Path) -> None:
    """`shard_placement_fn`: what holds of rows holds of columns."""
    checks = [
        "losses_gradients_and_states",
        "every_way_to_be_whole",
        "compiled_before_the_first_forward",
        "frozen_and_unfrozen_later",
        "gradients_add_up",
        "narrow_types",
        "without_values_until_later",
        "checkpoints",
        "a_step_that_failed",
        "units_that_are_in_use",
        "memory_is_left_after_backward",
    ]
    drawn = sample(checks, 3, "columns under fully_shard")
    run_ranks(JOBS, 2, "checks_by_columns", tmp_path, *drawn, "what_changes_shards_is_seen", "whole_by_hand")


def test_replicas_of_columns_on_two_hosts(tmp_path: Path) -> None:
    run_ranks(JOBS, 4, "checks_by_columns", tmp_path, "replicas_hold_the_same_shards", hosts=2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("cut", "saving", "other", "loading"), [("columns", 2, "rows", 3), ("rows", 3, "columns", 2)])
def test_a_checkpoint_is_loaded_into_another_cut(
    tmp_path: Path, cut: str, saving: int, other: str, loading: int
) -> None:
    """At another number of ranks, and into a whole copy, by Tessera's engine and by PyTorch's own."""
    run_ranks(JOBS, saving, "saves", tmp_path, cut)
    run_ranks(JOBS, loading, "loads", tmp_path, other)
    expected = torch.load(tmp_path / "whole.pt")["model"]
    for load, name in ((checkpoint.load, "native"), (checkpoint.load, "theirs"), (dcp.load, "torch_dcp")):
        plain = {key: torch.full_like(value, 7) for key, value in expected.items()}
        load({"model": plain}, checkpoint_id=tmp_path / name, no_dist=True)
        torch.testing.assert_close(plain, expected, rtol=0, atol=0)


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
