"""`tessera.torch.pipelining` computes what one process computes, with PyTorch's names and signatures."""

from __future__ import annotations

import importlib
import inspect
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fork_server import Start
from run_torch import run_python, run_ranks
from sampling import sample
from tessera.torch import pipelining as ours
from torch.distributed import pipelining as theirs

JOBS = Path(__file__).with_name("torch_pipelining_jobs.py")
SCHEDULES = [name for name in theirs.__all__ if name.startswith("Schedule")]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_have_pytorchs_signatures(name: str) -> None:
    our_class, their_class = getattr(ours, name), getattr(theirs, name)
    assert issubclass(our_class, their_class)
    assert parameters(our_class) == parameters(their_class)
    assert parameters(our_class.step) == parameters(their_class.step)
    assert parameters(our_class.eval) == parameters(their_class.eval)


def test_every_name_is_there() -> None:
    for path in ("", ".schedules", ".microbatch", ".stage"):
        our_module = importlib.import_module(f"tessera.torch.pipelining{path}")
        their_module = importlib.import_module(f"torch.distributed.pipelining{path}")
        assert not [name for name in their_module.__all__ if not hasattr(our_module, name)], path
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        ours.absent  # noqa: B018


NAMES = [
    "1F1B",
    "GPipe",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "PipelineScheduleSingle",
    "PipelineScheduleMulti",
]


@pytest.mark.parametrize("name", NAMES)
def test_schedules_by_name_are_ours(name: str) -> None:
    found = ours.get_schedule_class(name.lower())
    assert found.__name__.endswith(name)
    assert found.__module__ == "tessera.torch.pipelining.schedules"
    is_single = name in ("1F1B", "GPipe", "PipelineScheduleSingle")
    base = "PipelineScheduleSingle" if is_single else "PipelineScheduleMulti"
    assert issubclass(found, getattr(ours.schedules, base))


IMPORTS = """
import sys
import tessera.torch
assert "torch.distributed.pipelining" not in sys.modules
assert tessera.torch.pipelining.Schedule1F1B
"""


def test_tessera_torch_does_not_import_pipelining() -> None:
    done = run_python("-c", IMPORTS, start=Start.EXECUTE)
    assert done.returncode == 0, done.stderr


def test_two_ranks() -> None:
    """Every check that two ranks can do."""
    run_ranks(JOBS, 2)


def test_four_ranks() -> None:
    """Pipelines of data-parallel stages, skip connections over two stages, PyTorch's classes, and a sample of the
    rest."""
    checks = [
        "schedules",
        "tensors_of_all_kinds",
        "split_by_the_program",
        "split_backwards",
        "memory_is_let_go",
        "frozen_stages",
        "evaluations",
        "exceptions_in_a_stage",
        "declared_tensors",
        "wrong_batches",
        "wrong_stages",
    ]
    always = ("with_data_parallelism", "traced_pipes", "pytorchs_schedules")
    run_ranks(JOBS, 4, *always, *sample(checks, 4, "pipelining, 4 ranks"))


def test_one_and_three_ranks() -> None:
    run_ranks(JOBS, 1, "each_schedule_once", "evaluations")
    run_ranks(JOBS, 3, "each_schedule_once")


def test_a_rank_that_dies_in_a_step_is_named_to_the_others() -> None:
    run_ranks(JOBS, 2, "dies", ends={1: -signal.SIGKILL})
