"""Compares the library's schedules with DeepSpeed's classes for 10,000 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from deepspeed.runtime import lr_schedules
from tessera import LRSchedule

STEPS, BASE = 10_000, 0.4
WARMUP: dict[str, Any] = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 3000}
COSINE: dict[str, Any] = {"total_num_steps": 9000, "warmup_min_ratio": 0.1, "warmup_num_steps": 2000}
CYCLE: dict[str, Any] = {
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "cycle_first_step_size": 2500,
    "cycle_second_step_size": 4000,
    "decay_step_size": 1000,
    "decay_lr_rate": 0.1,
    "decay_mom_rate": 0.001,
}
STAIRS = {"cycle_first_stair_count": 7, "cycle_second_stair_count": 5}
CASES: list[tuple[type, dict[str, Any], LRSchedule]] = [
    (lr_schedules.WarmupLR, {}, LRSchedule.warmup()),
    (lr_schedules.WarmupLR, {**WARMUP, "warmup_type": "linear"}, LRSchedule.warmup(**WARMUP, warmup_type="linear")),
    (
        lr_schedules.WarmupDecayLR,
        {**WARMUP, "total_num_steps": 9000},
        LRSchedule.warmup(**WARMUP, total_num_steps=9000),
    ),
    (lr_schedules.WarmupCosineLR, COSINE, LRSchedule.warmup_cosine(**COSINE)),
    (lr_schedules.OneCycle, CYCLE, LRSchedule.one_cycle(**CYCLE)),
    (lr_schedules.OneCycle, {**CYCLE, **STAIRS}, LRSchedule.one_cycle(**CYCLE, **STAIRS)),
    (lr_schedules.LRRangeTest, {}, LRSchedule.range_test(1e-3, 2000, 1.0, False)),
    (
        lr_schedules.LRRangeTest,
        {"lr_range_test_step_size": 300, "lr_range_test_staircase": True},
        LRSchedule.range_test(1e-3, 300, 1.0, True),
    ),
]


def compare(theirs: type, options: dict[str, Any], ours: LRSchedule) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=BASE)
    schedule = theirs(optimizer, **options)
    (group,) = optimizer.param_groups
    rates, momenta = [group["lr"]], []
    for _ in range(STEPS):
        schedule.step()
        rates.append(group["lr"])
        momenta.append(group["betas"][0])
    np.testing.assert_allclose([ours.lr_at(t, BASE) for t in range(STEPS + 1)], rates, rtol=1e-12, atol=1e-12)
    if ours.momentum_at(0) is not None:
        found = np.array([ours.momentum_at(t) for t in range(1, STEPS + 1)], float)
        np.testing.assert_allclose(found, momenta, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    for case in CASES:
        compare(*case)
    print(f"{len(CASES)} schedules are equal")
