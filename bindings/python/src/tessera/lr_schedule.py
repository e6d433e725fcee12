"""Learning-rate schedules, which compute the rate of any step and set optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Unpack

from . import _core, _options
from ._base import Closable, checked
from ._base_optimizer import Optimizer
from ._given import raw, takes
from .errors import InvalidArgument

if TYPE_CHECKING:
    from ._options import LROneCycleOptions, LRWarmupCosineOptions, LRWarmupOptions

__all__ = ["LRSchedule"]

_DECAYS = ("linear", "cosine", "sqrt")  # in the order of their numbers


class LRSchedule(Closable):
    """The learning rate of each step, created by a method such as `cosine`; ``docs/SCHEDULES.md`` has the formulas.

    Steps count from 0, the optimizer's first. `attach` optimizers, and call `step` after each of their steps that was
    not skipped; or use `lr_at` alone. As a part of a `State` it is saved and loaded with its step and the optimizers'
    base rates. `base_lr` is an optimizer's own rate when it is attached.

    Examples
    --------
    >>> warmup = ts.LRSchedule.linear(0.1, 1.0, total_steps=10)
    >>> schedule = ts.LRSchedule.sequential([warmup, ts.LRSchedule.cosine(90, min_lr=0)], [10])
    >>> [round(schedule.lr_at(step, base_lr=1.0), 2) for step in (0, 5, 10, 55, 100)]
    [0.1, 0.55, 1.0, 0.5, 0.0]
    """

    _handle: _core.LRSchedule

    def __init__(self) -> None:
        raise TypeError("use LRSchedule.cosine(...) or another of its static methods")

    @classmethod
    def _adopt(cls, handle: _core.LRSchedule) -> LRSchedule:
        schedule = cls.__new__(cls)
        schedule._handle = handle
        return schedule

    @staticmethod
    def constant(factor: float, total_steps: int) -> LRSchedule:
        """`base_lr` times `factor` for `total_steps`, then `base_lr` (PyTorch's ``ConstantLR``)."""
        return LRSchedule._adopt(_core.lr_constant(factor, total_steps))

    @staticmethod
    def linear(start_factor: float, end_factor: float, total_steps: int) -> LRSchedule:
        """`base_lr` times a factor that changes linearly, then stays (PyTorch's ``LinearLR``)."""
        return LRSchedule._adopt(_core.lr_linear(start_factor, end_factor, total_steps))

    @staticmethod
    def step_decay(step_size: int, gamma: float) -> LRSchedule:
        """`base_lr` times ``gamma ** (step // step_size)`` (PyTorch's ``StepLR``)."""
        return LRSchedule._adopt(_core.lr_step_decay(step_size, gamma))

    @staticmethod
    def multi_step_decay(milestones: Iterable[int], gamma: float) -> LRSchedule:
        """`base_lr` times `gamma` for each milestone that was reached; they ascend (PyTorch's ``MultiStepLR``)."""
        return LRSchedule._adopt(_core.lr_multi_step_decay(list(milestones), gamma))

    @staticmethod
    def exponential(gamma: float) -> LRSchedule:
        """`base_lr` times ``gamma ** step`` (PyTorch's ``ExponentialLR``)."""
        return LRSchedule._adopt(_core.lr_exponential(gamma))

    @staticmethod
    def polynomial(total_steps: int, power: float) -> LRSchedule:
        """`base_lr` times ``(1 - step / total_steps) ** power``, then 0 (PyTorch's ``PolynomialLR``)."""
        return LRSchedule._adopt(_core.lr_polynomial(total_steps, power))

    @staticmethod
    def cosine(total_steps: int, min_lr: float) -> LRSchedule:
        """From `base_lr` to `min_lr` along half a cosine, and back, repeatedly (PyTorch's ``CosineAnnealingLR``)."""
        return LRSchedule._adopt(_core.lr_cosine(total_steps, min_lr))

    @staticmethod
    def cosine_restarts(first_steps: int, multiplier: int, min_lr: float) -> LRSchedule:
        """From `base_lr` to `min_lr` along half a cosine, then again (PyTorch's ``CosineAnnealingWarmRestarts``).

        Parameters
        ----------
        first_steps : int
            How many steps the first cycle lasts.
        multiplier : int
            How many times longer each cycle is than the previous one.
        min_lr : float
            The rate that a cycle ends at.
        """
        return LRSchedule._adopt(_core.lr_cosine_restarts(first_steps, multiplier, min_lr))

    @staticmethod
    def inverse_sqrt(warmup_steps: int) -> LRSchedule:
        """`base_lr` times ``min(s / w, sqrt(w / s))``, w warm-up steps, ``s = step + 1`` (Vaswani et al. 2017)."""
        return LRSchedule._adopt(_core.lr_inverse_sqrt(warmup_steps))

    @staticmethod
    def wsd(
        warmup_steps: int,
        stable_steps: int,
        decay_steps: int,
        decay: Literal["linear", "cosine", "sqrt"],
        min_ratio: float,
    ) -> LRSchedule:
        """Warm-up, stable, decay (Hu et al. 2024).

        `base_lr` times a factor that rises linearly from `min_ratio` to 1, stays, falls to `min_ratio`, and stays.

        Parameters
        ----------
        warmup_steps, stable_steps, decay_steps : int
            How long each part lasts.
        decay : str
            The shape of the decay, by the share u of it that is done: ``1 - u`` (linear), ``(1 + cos(pi * u)) / 2``
            (cosine) or ``1 - sqrt(u)`` (sqrt).
        min_ratio : float
            Where the warm-up begins and the decay ends, as a share of `base_lr`.
        """
        if decay not in _DECAYS:
            raise InvalidArgument(f"decay is {decay!r}; it must be one of {', '.join(map(repr, _DECAYS))}")
        return LRSchedule._adopt(_core.lr_wsd(warmup_steps, stable_steps, decay_steps, _DECAYS.index(decay), min_ratio))

    @staticmethod
    @takes(_options.LR_WARMUP)
    def warmup(**options: Unpack[LRWarmupOptions]) -> LRSchedule:
        """DeepSpeed's ``WarmupLR`` or, with `total_num_steps`, its ``WarmupDecayLR``. Its iteration is the step - 1.

        Parameters
        ----------
        <options>
        """
        return LRSchedule._adopt(_core.lr_warmup(**raw(_options.LR_WARMUP, options)))

    @staticmethod
    @takes(_options.LR_WARMUP_COSINE)
    def warmup_cosine(**options: Unpack[LRWarmupCosineOptions]) -> LRSchedule:
        """DeepSpeed's ``WarmupCosineLR``. Its iteration is the step - 1; at step 0 the rate is 0.

        Parameters
        ----------
        <options>
        """
        return LRSchedule._adopt(_core.lr_warmup_cosine(**raw(_options.LR_WARMUP_COSINE, options)))

    @staticmethod
    @takes(_options.LR_ONE_CYCLE)
    def one_cycle(**options: Unpack[LROneCycleOptions]) -> LRSchedule:
        """DeepSpeed's ``OneCycle``, which sets the rate whatever `base_lr` is, and momentum (Adam: the first beta).

        Parameters
        ----------
        <options>
        """
        return LRSchedule._adopt(_core.lr_one_cycle(**raw(_options.LR_ONE_CYCLE, options)))

    @staticmethod
    def range_test(min_lr: float, step_size: int, step_rate: float, staircase: bool) -> LRSchedule:
        """`min_lr` times ``1 + step_rate * step / step_size``, whatever `base_lr` is (DeepSpeed's ``LRRangeTest``).

        With `staircase`, ``step / step_size`` is rounded down.
        """
        return LRSchedule._adopt(_core.lr_range_test(min_lr, step_size, step_rate, staircase))

    @staticmethod
    def sequential(schedules: Iterable[LRSchedule], milestones: Iterable[int]) -> LRSchedule:
        """One schedule after the other (PyTorch's ``SequentialLR``). Each begins with its step 0.

        Parameters
        ----------
        schedules : iterable of LRSchedule
            At least 1; at most 1000 in all, nested at most 16 deep. The steps that they have made do not count.
        milestones : iterable of int
            The steps at which the second to last schedule begin, strictly ascending.
        """
        return LRSchedule._adopt(_core.lr_sequential(_handles(schedules), list(milestones)))

    @staticmethod
    def chained(schedules: Iterable[LRSchedule]) -> LRSchedule:
        """Several schedules at once (PyTorch's ``ChainedScheduler``).

        Each takes the rate of the previous one as `base_lr`, so factors multiply. One that sets the rate whatever
        `base_lr` is can only be the first.
        """
        return LRSchedule._adopt(_core.lr_chained(_handles(schedules)))

    def lr_at(self, step: int, base_lr: float) -> float:
        """The learning rate of a step, from 0; it depends on nothing else and changes nothing.

        Raises
        ------
        InvalidArgument
            An argument is negative or not finite, or the rate is not finite at this step.
        """
        return _core.lr_schedule_lr_at(self._handle, step, base_lr)

    def momentum_at(self, step: int) -> float | None:
        """The momentum of a step (Adam: the first beta); None if the schedule leaves it unchanged."""
        momentum = _core.lr_schedule_momentum_at(self._handle, step)
        return None if math.isnan(momentum) else momentum

    def attach(self, optimizer: Optimizer) -> None:
        """Set an optimizer from now on: its `lr`, whose value so far becomes `base_lr`, and momentum if there is one.

        Attach it before a checkpoint is loaded. The schedule does not keep it alive.

        Raises
        ------
        InvalidState
            It is attached already.
        InvalidArgument
            It has no momentum, but the schedule sets one.
        """
        _core.lr_schedule_attach(self._handle, checked(optimizer, Optimizer, "optimizer")._handle)

    def step(self) -> None:
        """Move on to the next step and set the attached optimizers. Call it after their step, if it was not skipped."""
        _core.lr_schedule_step(self._handle)

    @property
    def steps(self) -> int:
        """Number of steps made, including those before a loaded checkpoint. Setting it sets the optimizers."""
        return _core.lr_schedule_steps(self._handle)

    @steps.setter
    def steps(self, steps: int) -> None:
        _core.lr_schedule_set_steps(self._handle, steps)

    def close(self) -> None:
        """Refuse further calls. The optimizers keep what it has set."""
        _core.lr_schedule_destroy(self._handle)


def _handles(schedules: Iterable[LRSchedule]) -> list[_core.LRSchedule]:
    return [checked(each, LRSchedule, f"schedule {i}")._handle for i, each in enumerate(schedules)]
