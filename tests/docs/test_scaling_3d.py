"""The simulation of steps that are cut by width, depth and data, in its limits."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import scaling_3d  # noqa: E402
from scaling_3d import Layout, makespan, reduce_between_hosts, reduce_in_host, step  # noqa: E402
from scaling_fsdp import Machine  # noqa: E402

MACHINE = Machine(memory=40e9, meeting=1e-5)


def test_a_schedule_takes_what_the_formula_says() -> None:
    assert makespan("1f1b", 4, 16, 1.0, 0.0) == pytest.approx((16 + 3) * 3)
    assert makespan("1f1b", 1, 16, 1.0, 0.0) == pytest.approx(16 * 3)
    assert makespan("zbv", 4, 16, 1.0, 0.0) == pytest.approx(16 * 3 + 3 / 2)  # a bubble of P - 1 forwards of a stage


def test_the_shares_of_a_step_are_its_whole() -> None:
    for ranks in scaling_3d.RANKS[:2]:
        for layout in scaling_3d.layouts(ranks):
            assert layout.ranks == ranks
            of = step(layout, MACHINE)
            assert of.computing + of.idle + of.tensor + of.data == pytest.approx(1, abs=1e-6)


def test_communication_that_takes_nothing_leaves_computing_and_idle_time() -> None:
    free = Machine(memory=math.inf, meeting=0.0)
    alone, whole = step(Layout(1, 1, 1), free), step(Layout(1, 8, 1), free)
    assert whole.seconds == pytest.approx(alone.seconds / 8)
    assert (alone.idle, alone.tensor, alone.data) == (0, 0, 0)


def test_an_all_reduce_costs_what_docs_scaling_says() -> None:
    assert reduce_in_host(40e9, 8, MACHINE) == pytest.approx(2 * 8 + 2e-5)
    assert reduce_in_host(40e9, 2, MACHINE) == pytest.approx(2 * 2 * 4 + 2e-5), "four groups share the memory"
    assert reduce_in_host(40e9, 1, MACHINE) == reduce_between_hosts(40e9, 1) == 0
    assert reduce_between_hosts(12.5e9, 2) == pytest.approx(16 / 2)
    assert reduce_between_hosts(1024, 101) == pytest.approx(2 * 10e-6 * 100)
