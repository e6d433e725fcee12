"""Schedules have the values of torch.optim.lr_scheduler, and of DeepSpeed's formulas, for 10,000 steps."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import tessera as ts
import torch
from tessera import LRSchedule
from torch.optim import Optimizer, lr_scheduler

sys.path.insert(0, str(Path(__file__).parents[1] / "optim"))
import make_lr_golden as formulas

STEPS = 10_000
BASE = 0.4

Theirs = Callable[[Optimizer], lr_scheduler.LRScheduler]


def _sequence(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 500),
        lr_scheduler.CosineAnnealingLR(optimizer, 6000, 0.001),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 300, 2, 0.002),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [500, 6500])


def _chain(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 500),
        lr_scheduler.MultiStepLR(optimizer, [3000, 6000], 0.3),
        lr_scheduler.ExponentialLR(optimizer, 0.9998),
        lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    ]
    return lr_scheduler.ChainedScheduler(parts)


PYTORCH: dict[str, tuple[Theirs, LRSchedule]] = {
    "constant": (lambda o: lr_scheduler.ConstantLR(o, 0.3, 700), LRSchedule.constant(0.3, 700)),
    "linear": (lambda o: lr_scheduler.LinearLR(o, 0.01, 0.7, 5000), LRSchedule.linear(0.01, 0.7, 5000)),
    "step": (lambda o: lr_scheduler.StepLR(o, 700, 0.6), LRSchedule.step_decay(700, 0.6)),
    "multi-step": (
        lambda o: lr_scheduler.MultiStepLR(o, [10, 4000, 4000, 9000], 0.3),
        LRSchedule.multi_step_decay([10, 4000, 4000, 9000], 0.3),
    ),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.9995), LRSchedule.exponential(0.9995)),
    "polynomial": (lambda o: lr_scheduler.PolynomialLR(o, 9000, 1.7), LRSchedule.polynomial(9000, 1.7)),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 9500, 0.003), LRSchedule.cosine(9500, 0.003)),
    "short cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 700), LRSchedule.cosine(700, 0)),
    "restarts": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 900, 1, 0.01),
        LRSchedule.cosine_restarts(900, 1, 0.01),
    ),
    "longer restarts": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7, 3),
        LRSchedule.cosine_restarts(7, 3, 0),
    ),
    "sequential": (
        _sequence,
        LRSchedule.sequential(
            [
                LRSchedule.linear(0.01, 1, 500),
                LRSchedule.cosine(6000, 0.001),
                LRSchedule.cosine_restarts(300, 2, 0.002),
            ],
            [500, 6500],
        ),
    ),
    "chained": (
        _chain,
        LRSchedule.chained(
            [
                LRSchedule.linear(0.01, 1, 500),
                LRSchedule.multi_step_decay([3000, 6000], 0.3),
                LRSchedule.exponential(0.9998),
                LRSchedule.cosine(STEPS, 0),
            ]
        ),
    ),
}


@pytest.mark.parametrize("kind", PYTORCH)
def test_values_are_pytorchs(kind: str) -> None:
    make, ours = PYTORCH[kind]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of SequentialLR, about its own calls
        theirs = make(optimizer)
        optimizer.step()
        rates = [optimizer.param_groups[0]["lr"]]
        for _ in range(STEPS):
            theirs.step()
            rates.append(optimizer.param_groups[0]["lr"])
    np.testing.assert_allclose([ours.lr_at(step, BASE) for step in range(STEPS + 1)], rates, rtol=1e-12, atol=1e-12)


def test_an_optimizer_is_driven_as_pytorchs() -> None:
    """The rates that an attached optimizer has are those that its schedule computes."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    theirs = lr_scheduler.CosineAnnealingLR(optimizer, 50, 0.01)
    mine = ts.SGD({"w": np.zeros(1)}, {"w": np.zeros(1)}, lr=BASE)
    ours = LRSchedule.cosine(50, 0.01)
    ours.attach(mine)
    for _ in range(60):
        assert mine.lr == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-12)
        optimizer.step()
        theirs.step()
        ours.step()


DEEPSPEED: dict[str, tuple[Callable[..., float], dict[str, object], LRSchedule]] = {
    "WarmupLR": (formulas.warmup_lr, {}, LRSchedule.warmup()),
    "WarmupLR linear": (
        formulas.warmup_lr,
        {"min_lr": 0.01, "max_lr": 0.1, "steps": 3000, "kind": "linear"},
        LRSchedule.warmup(warmup_min_lr=0.01, warmup_max_lr=0.1, warmup_num_steps=3000, warmup_type="linear"),
    ),
    "WarmupDecayLR": (
        formulas.warmup_decay_lr,
        {"total": 9000, "min_lr": 0.01, "max_lr": 0.1, "steps": 3000},
        LRSchedule.warmup(warmup_min_lr=0.01, warmup_max_lr=0.1, warmup_num_steps=3000, total_num_steps=9000),
    ),
    "WarmupCosineLR": (
        formulas.warmup_cosine_lr,
        {"total": 9000, "min_ratio": 0.1},
        LRSchedule.warmup_cosine(total_num_steps=9000, warmup_min_ratio=0.1),
    ),
    "OneCycle": (
        formulas.one_cycle_lr,
        {"low": 0.01, "high": 0.1, "first": 2500, "second": 4000, "decay_step": 100, "decay_rate": 0.1},
        LRSchedule.one_cycle(
            cycle_min_lr=0.01,
            cycle_max_lr=0.1,
            cycle_first_step_size=2500,
            cycle_second_step_size=4000,
            decay_step_size=100,
            decay_lr_rate=0.1,
        ),
    ),
    "LRRangeTest": (formulas.range_test, {}, LRSchedule.range_test(1e-3, 2000, 1.0, False)),
    "LRRangeTest staircase": (
        formulas.range_test,
        {"min_lr": 0.02, "size": 300, "rate": 0.5, "staircase": True},
        LRSchedule.range_test(0.02, 300, 0.5, True),
    ),
}


@pytest.mark.parametrize("kind", DEEPSPEED)
def test_values_are_deepspeeds(kind: str) -> None:
    formula, options, ours = DEEPSPEED[kind]
    rates = [formula(i, BASE, **options) for i in range(-1, STEPS)]
    np.testing.assert_allclose([ours.lr_at(step, BASE) for step in range(STEPS + 1)], rates, rtol=1e-12, atol=1e-12)


def test_momenta_are_deepspeeds() -> None:
    ours = LRSchedule.one_cycle(
        cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=2500, decay_step_size=1000, decay_mom_rate=0.001
    )
    momenta = [formulas.one_cycle_momentum(i, first=2500, decay_step=1000, decay_rate=0.001) for i in range(-1, STEPS)]
    found = [ours.momentum_at(step) for step in range(STEPS + 1)]
    np.testing.assert_allclose(np.array(found, float), momenta, rtol=1e-12, atol=1e-12)


def test_a_schedule_drives_an_optimizer_of_pytorch() -> None:
    """As docs/SCHEDULES.md shows."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    schedule = LRSchedule.wsd(2, 2, 2, "sqrt", 0.0)
    driver = lr_scheduler.LambdaLR(optimizer, lambda step: schedule.lr_at(step, 1.0))
    for step in range(8):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(schedule.lr_at(step, BASE))
        optimizer.step()
        driver.step()
