"""Learning-rate schedules: DeepSpeed's five by `tessera.LRSchedule`, PyTorch's classes by name, and the program's
own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from ...errors import InvalidArgument
from ...lr_schedule import LRSchedule
from .settings import Settings

__all__ = ["LRRangeTest", "OneCycle", "Schedule", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "make_scheduler"]


class Schedule:
    """A `tessera.LRSchedule` for an optimizer of PyTorch, with the methods of DeepSpeed's schedules.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Gets the first rate now, and another one in each `step`: each group by its own rate so far.
    schedule : tessera.LRSchedule
        The rates; the steps that it has made do not count.
    last_batch_iteration : int
        Of the step before the next one; -1 at the beginning.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: LRSchedule, last_batch_iteration: int = -1) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"the optimizer of a schedule is a {type(optimizer).__name__}; expected a torch.optim class"
            )
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._schedule = schedule
        self._bases = [float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self._set()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move on to the next step, or to the one after `last_batch_iteration`, and set the optimizer."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def _set(self) -> None:
        momentum = self._schedule.momentum_at(self.last_batch_iteration + 1)
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
            if momentum is not None and "betas" in group:
                group["betas"] = (momentum, 0.99)  # as DeepSpeed's OneCycle
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """The rates of the next step, one per group."""
        return [self._schedule.lr_at(self.last_batch_iteration + 1, base) for base in self._bases]

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a state."""
        self.step(int(state["last_batch_iteration"]))


def WarmupLR(optimizer: Any, last_batch_iteration: int = -1, **options: Any) -> Schedule:
    """DeepSpeed's ``WarmupLR``: options as for `tessera.LRSchedule.warmup`."""
    return Schedule(optimizer, LRSchedule.warmup(**_given(options)), last_batch_iteration)


def WarmupDecayLR(optimizer: Any, total_num_steps: int, last_batch_iteration: int = -1, **options: Any) -> Schedule:
    """DeepSpeed's ``WarmupDecayLR``: options as for `tessera.LRSchedule.warmup`."""
    options = {"warmup_max_lr": 0.001, **_given(options)}
    return Schedule(optimizer, LRSchedule.warmup(total_num_steps=total_num_steps, **options), last_batch_iteration)


def WarmupCosineLR(optimizer: Any, total_num_steps: int, last_batch_iteration: int = -1, **options: Any) -> Schedule:
    """DeepSpeed's ``WarmupCosineLR``: options as for `tessera.LRSchedule.warmup_cosine`."""
    schedule = LRSchedule.warmup_cosine(total_num_steps=total_num_steps, **_given(options))
    return Schedule(optimizer, schedule, last_batch_iteration)


def OneCycle(
    optimizer: Any, cycle_min_lr: float, cycle_max_lr: float, last_batch_iteration: int = -1, **options: Any
) -> Schedule:
    """DeepSpeed's ``OneCycle``: options as for `tessera.LRSchedule.one_cycle`."""
    schedule = LRSchedule.one_cycle(cycle_min_lr=cycle_min_lr, cycle_max_lr=cycle_max_lr, **_given(options))
    return Schedule(optimizer, schedule, last_batch_iteration)


def LRRangeTest(
    optimizer: Any,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
    last_batch_iteration: int = -1,
) -> Schedule:
    """DeepSpeed's ``LRRangeTest``: see `tessera.LRSchedule.range_test`."""
    schedule = LRSchedule.range_test(
        lr_range_test_min_lr, lr_range_test_step_size, lr_range_test_step_rate, lr_range_test_staircase
    )
    return Schedule(optimizer, schedule, last_batch_iteration)


_DEEPSPEEDS: dict[str, Callable[..., Schedule]] = {
    one.__name__: one for one in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def make_scheduler(settings: Settings, optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler that the configuration names.

    Raises
    ------
    InvalidArgument
        There is no such class, or it refuses the parameters; the message has both.
    """
    assert settings.scheduler is not None
    kind, params = settings.scheduler
    of_torch = getattr(lr_scheduler, kind, None)
    make: Any = _DEEPSPEEDS.get(kind)
    if make is None and isinstance(of_torch, type) and issubclass(of_torch, lr_scheduler.LRScheduler):
        make = of_torch
    if make is None:
        raise InvalidArgument(
            f"scheduler.type is {kind!r}; it must be {', '.join(_DEEPSPEEDS)} or the exact name of a class of "
            "torch.optim.lr_scheduler"
        )
    try:
        return make(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"scheduler.params {params} do not fit {kind}: {error}") from error


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Without what is None, which means DeepSpeed's default."""
    return {key: value for key, value in options.items() if value is not None}
