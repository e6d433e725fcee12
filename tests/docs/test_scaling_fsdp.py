"""The simulation of a fully sharded step in its limits, and what docs/MEMORY.md predicts."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fsdp_memory  # noqa: E402
import rank_processes  # noqa: E402
import results  # noqa: E402
import scaling_fsdp  # noqa: E402
from scaling_fsdp import Machine, Options, Unit, step, step_of  # noqa: E402

TWO = [Unit(1e6, 2.0, 4.0), Unit(1e6, 3.0, 6.0)]


def test_communication_that_takes_nothing_leaves_the_computing() -> None:
    free = Machine(memory=math.inf, meeting=0.0, link=math.inf, alpha=0.0)
    for ranks in scaling_fsdp.RANKS:
        assert step_of(TWO, ranks, free) == 15.0
        assert step_of(TWO, ranks, free, shard_ranks=8) == 15.0


def test_computing_that_takes_nothing_leaves_the_communication_of_one_link() -> None:
    units = [Unit(1e6, 0.0, 0.0), Unit(1e6, 0.0, 0.0, keep=True)]
    # Three gathers, since one unit stays whole, and two reductions.
    assert step(units, [1.0, 2.0], [4.0, 8.0], Options(one_link=True)) == (1 + 2) + 1 + (4 + 8)


def test_two_units_by_hand() -> None:
    # Forward: gathers 0-1 and 1-2, computing 1-3 and 3-6. Backward: both gathers begin at 6 and end at 7 and 8;
    # computing 7-13 and 13-17, reductions 13-18 and 18-23.
    assert step(TWO, [1.0, 1.0], [5.0, 5.0], Options()) == 23.0
    # No prefetch: gathers 0-1, 3-4, computing 1-3 and 4-7; 7-8 and 8-14, 14-15 and 15-19; reductions 14-19, 19-24.
    assert step(TWO, [1.0, 1.0], [5.0, 5.0], Options(0, 0)) == 24.0
    # One's gradients in memory: the second backward begins when the first reduction ends, 18-22, and then 22-27.
    assert step(TWO, [1.0, 1.0], [5.0, 5.0], Options(grads_in_flight=1)) == 27.0
    # One link: as two lanes here, as no gather comes after a reduction.
    assert step(TWO, [1.0, 1.0], [5.0, 5.0], Options(one_link=True)) == 23.0


def test_a_unit_that_stays_whole_is_gathered_once() -> None:
    units = [TWO[0], Unit(1e6, 3.0, 6.0, keep=True)]
    # Forward until 6; backward 6-12, the other's gather meanwhile, 12-16; reductions 12-17, 17-22.
    assert step(units, [1.0, 1.0], [5.0, 5.0], Options()) == 22.0


def test_costs_by_hand() -> None:
    machine = Machine(memory=100.0, meeting=0.5, link=10.0, alpha=0.0)
    assert scaling_fsdp.gather_seconds(100.0, 1, 4, machine) == 2.0 + 1.0
    assert scaling_fsdp.gather_seconds(100.0, 2, 4, machine) == 1.0 + 1.0 + 5.0
    assert scaling_fsdp.reduce_seconds(100.0, 1, 4, machine) == 5.0 + 1.0
    assert scaling_fsdp.reduce_seconds(1000.0, 2, 4, machine) == 51.0  # inside a host; its link takes 50
    # Shards of 20 of four ranks a host, two replicas: 2 x 20 x 4 / 2 through a link.
    assert scaling_fsdp.replicas_seconds(80.0, 4, 2, 4, machine) == 8.0
    slow = Machine(memory=math.inf, meeting=0.0, link=math.inf, alpha=1.0)
    assert scaling_fsdp.gather_seconds(1.0, 3, 1, slow, batches=2) == 2 * 5
    assert scaling_fsdp.reduce_seconds(float(3 << 20), 3, 1, slow, batches=2) == 2 * 5


def test_no_overlap_adds_everything() -> None:
    machine = Machine(memory=1e6, meeting=0.0)
    # Of each unit two gathers of 2, a reduction of 3, and gradients handed over by 2 ranks, 4.
    assert scaling_fsdp.without_overlap(TWO, 2, machine) == 15 + 2 * (4 + 3 + 4)


def test_what_was_measured_lies_within_a_tenth() -> None:
    for ranks in (2, 4):
        ours, alone = scaling_fsdp.measured(ranks)
        units, machine = scaling_fsdp.measured_units(alone), scaling_fsdp.measured_machine(ranks)
        assert sum(u.forward + u.backward for u in units) == pytest.approx(alone)
        assert scaling_fsdp.without_overlap(units, ranks, machine) == pytest.approx(ours, rel=0.1)


def test_whole_parameters_are_as_predicted() -> None:
    whole = fsdp_memory.measured(results.read("fsdp_memory"), fsdp_memory.WHOLE)
    assert {kind for kind, _ in whole} == set(fsdp_memory.COLORS)
    for (kind, ranks), value in whole.items():
        assert value == pytest.approx(fsdp_memory.predicted(kind, ranks), rel=0.02), (kind, ranks)


def test_pages_are_counted_once() -> None:
    assert rank_processes.length_of({(1, 0, 10), (1, 5, 20), (1, 6, 8), (2, 0, 10), (2, 30, 31)}) == 20 + 10 + 1
    assert rank_processes.length_of(set()) == 0
