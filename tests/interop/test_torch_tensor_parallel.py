"""`tessera.torch.tensor.parallel` computes what one process computes, and refuses what PyTorch silently gets wrong."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fork_server import Start
from run_torch import run_python, run_ranks
from sampling import sample
from tessera.torch.tensor import parallel as ours
from torch.distributed.tensor import parallel as theirs

JOBS = Path(__file__).with_name("torch_tensor_parallel_jobs.py")


@pytest.mark.parametrize("name", theirs.__all__)
def test_signatures_are_pytorchs(name: str) -> None:
    """Some have one argument more."""
    more = {"parallelize_module": ["strict"], "ColwiseParallel": ["heads"], "RowwiseParallel": ["heads"]}

    def signature(module: Any) -> list[tuple[str, Any, Any]]:
        thing: Callable[..., Any] = getattr(module, name)
        return [(one.name, one.kind, one.default) for one in inspect.signature(thing).parameters.values()]

    expected, got = signature(theirs), signature(ours)
    assert got[: len(expected)] == expected
    assert [extra for extra, _, _ in got[len(expected) :]] == more.get(name, [])


def test_every_name_is_there() -> None:
    for path in ("", ".api", ".style", ".loss", ".ddp", ".fsdp", ".input_reshard"):
        our_module = importlib.import_module(f"tessera.torch.tensor.parallel{path}")
        their_module = importlib.import_module(f"torch.distributed.tensor.parallel{path}")
        missing = [name for name in their_module.__all__ if not hasattr(our_module, name)]
        assert not missing, path
    their_tensor = importlib.import_module("torch.distributed.tensor")
    our_tensor = importlib.import_module("tessera.torch.tensor")
    assert all(getattr(our_tensor, name) is getattr(their_tensor, name) for name in their_tensor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        ours.absent  # noqa: B018


IMPORTS = """
import sys
import tessera
assert "torch" not in sys.modules
import tessera.torch
assert "torch.distributed.tensor" not in sys.modules
assert tessera.torch.tensor.parallel.parallelize_module
"""


def test_tessera_torch_does_not_import_dtensor() -> None:
    done = run_python("-c", IMPORTS, start=Start.EXECUTE)
    assert done.returncode == 0, done.stderr


def test_two_ranks() -> None:
    """Every check."""
    run_ranks(JOBS, 2)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_other_numbers_of_ranks(ranks: int) -> None:
    checks = [
        "linear_layers",
        "attention_heads",
        "embeddings",
        "losses",
        "llama",
        "recomputed_activations",
        "memory_of_activations",
        "tied_embeddings",
        "dtensors_of_any_size",
        "functional_exchanges",
        "sequences",
        "ranks_that_differ",
        "values_come_from_one_rank",
        "collectives",
    ]
    always = ["losses_on_two_dimensions", "llama_with_fsdp", "meshes"] if ranks == 4 else []
    run_ranks(JOBS, ranks, *sample(checks, 3, f"tensor parallel, {ranks} ranks"), *always)
