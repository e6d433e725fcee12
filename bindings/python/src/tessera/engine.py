"""DeepSpeed's engine: a ds_config makes the model, the optimizer, the loss scale and the schedule, and rules each step.

docs/ENGINE.md lists the keys. `tessera.torch.engine` is the engine for modules of PyTorch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from . import _core, _options
from ._base import Closable, checked, there_are
from ._base_optimizer import Optimizer
from ._given import raw, takes
from ._params import Block, Grads, Params, named, parameter
from .comm import Comm
from .errors import InvalidArgument, InvalidState, NotFound
from .lr_schedule import LRSchedule
from .tensor import array_over

if TYPE_CHECKING:
    from ._options import LossScaleOptions

__all__ = ["Engine", "EngineCounts", "LossScale", "config_schedule", "resolve_config"]

Config = Mapping[str, Any] | str | os.PathLike[str]
"""A ds_config: a dict, its text (a str with a brace), or the path of its file. JSON may have comments and trailing
commas."""


def resolve_config(config: Config, ranks: int) -> dict[str, Any]:
    """What a configuration says for a number of data-parallel ranks, without an engine.

    Parameters
    ----------
    config : dict, str or path
        A ds_config, its text, or the path of its file. A str that has a ``{`` is text, any other is a path.
    ranks : int
        At least 1.

    Returns
    -------
    dict
        The batch sizes, and all settings with every default; docs/ENGINE.md lists them. An optimizer or scheduler that
        the library does not have is passed through, with ``"core": False``. "reports" lists the keys that are unknown,
        deprecated or without effect.

    Raises
    ------
    InvalidArgument
        The configuration is malformed or contradicts itself; the message has the key, its line, its value and what to
        do. Lines of a dict are those of ``json.dumps(config, indent=2)``.
    Unsupported
        The library refuses a key.
    NotFound, TesseraIOError
        The file cannot be read.

    Examples
    --------
    >>> config = {"train_batch_size": 32, "gradient_accumulation_steps": 2}
    >>> resolve_config(config, ranks=4)["train_micro_batch_size_per_gpu"]
    4
    """
    resolved: dict[str, Any] = json.loads(_core.engine_config(_text_of(config), ranks))
    return resolved


def config_schedule(config: Config) -> LRSchedule:
    """The learning-rate schedule of a configuration's "scheduler", for trainers without an engine.

    Raises
    ------
    InvalidArgument
        There is no "scheduler"; or as `resolve_config`.
    Unsupported
        The library does not have its type.
    """
    return LRSchedule._adopt(_core.engine_config_schedule(_text_of(config)))


class EngineCounts(NamedTuple):
    """What an engine has counted, including what a loaded checkpoint had."""

    global_steps: int
    """Boundaries, with those whose step was skipped."""
    global_samples: int
    """Samples of all ranks."""
    skipped_steps: int
    """Boundaries whose step was skipped."""
    micro_steps: int
    """Calls of `Engine.step`."""


class Engine(Closable):
    """DeepSpeed's engine: it trains a model as a ds_config says. Collective: every rank begins with rank 0's values.

    The configuration chooses the optimizer, the ZeRO stage, the precision, accumulation, clipping and the schedule.
    The program computes: in each micro-step a `forward` of each unit, a loss times `loss_factor`, a `backward` of each
    unit from the last to the first, `backward_done` and `step`. The same program runs at every stage. One thread at a
    time may use an engine.

    Parameters
    ----------
    comm : Comm
        The data-parallel ranks. It must stay open.
    units : mapping of str to parameters
        The parameters of each unit, such as a layer, in the order of the forward, as for `DDP`: contiguous
        floating-point arrays in CPU memory. Names must be unique in the model; a leading ``module.`` or ``_orig_mod.``
        is stripped. At stage 0 without "fp16" and "bf16" the arrays are trained in place, and kept; otherwise they are
        only read here.
    config : dict, str or path
        A ds_config with an "optimizer"; its text; or the path of its file. A str that has a ``{`` is text, any other
        is a path. The same on every rank.
    schedule : LRSchedule, optional
        Instead of a "scheduler" of the configuration. The engine attaches its optimizer to it and steps it.

    Raises
    ------
    InvalidArgument
        The configuration is malformed or contradicts itself; the message has the key, its line, its value and what to
        do. Or a parameter is not contiguous or not floating-point.
    Unsupported
        The library refuses a key or does not have the optimizer or scheduler; or an array is on a device.
    Mismatch
        The ranks have different configurations or models; the message names the first difference.
    TypeError
        An argument has a wrong type. Then, as with all errors above, the creation fails on every rank; the message of
        the others has the rank and how its error begins.
    NotFound, TesseraIOError
        A rank cannot read the file of the configuration; on every rank.

    Examples
    --------
    >>> engine = ts.Engine(comm, {"fc1": {"w1": w1}, "fc2": {"w2": w2}}, "ds_config.json")  # doctest: +SKIP
    >>> with engine.forward("fc1") as params:  # doctest: +SKIP
    ...     hidden = inputs @ params["w1"].T
    >>> with engine.backward("fc1") as (params, grads):  # doctest: +SKIP
    ...     grads["w1"][...] = delta.T @ inputs + (grads["w1"] if engine.adds_gradients else 0)
    >>> engine.backward_done()  # doctest: +SKIP
    >>> engine.step()  # doctest: +SKIP
    True
    """

    _handle: _core.Engine
    _names: tuple[str, ...] = ()
    _units: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        comm: Comm,
        units: Mapping[str, Params],
        config: Config,
        schedule: LRSchedule | None = None,
    ) -> None:
        handle = checked(comm, Comm, "comm", units, config)._handle

        def arguments() -> tuple[list[tuple[str, list[str], list[_core.Tensor]]], str, _core.LRSchedule | None]:
            if not isinstance(units, Mapping):
                raise TypeError(f"units is a {type(units).__name__}; it must be a dict of parameters by unit")
            given = {name: named(params, f"unit {name!r}") for name, params in units.items()}
            of_core = [
                (unit, names, [parameter(name, array) for name, array in zip(names, arrays, strict=True)])
                for unit, (names, arrays) in given.items()
            ]
            curve = None if schedule is None else checked(schedule, LRSchedule, "schedule")._handle
            return of_core, _text_of(config), curve

        self._handle = _core.engine_create(handle, arguments)
        resolved = self.config
        if resolved["zero_optimization"]["stage"] > 0 or resolved["precision"] != "params":
            _core.engine_drop_params(self._handle)
        self._has_schedule = schedule is not None or resolved["scheduler"] is not None
        self._units = {unit: i for i, unit in enumerate(units)}
        self._of_unit: list[list[int]] = [[] for _ in range(_core.engine_unit_count(self._handle))]
        params = [_core.engine_param_name(self._handle, i) for i in range(_core.engine_param_count(self._handle))]
        for i, (_, unit) in enumerate(params):
            self._of_unit[unit].append(i)
        self._names = tuple(name for name, _ in params)
        self._unit_of = [unit for _, unit in params]
        self._backward: dict[int, _Backward] = {}  # of units in their backward

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units, in the order of the forward."""
        return tuple(self._units)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, unit after unit."""
        return self._names

    @property
    def config(self) -> dict[str, Any]:
        """What the configuration says, as `resolve_config`, with the batch sizes as they are now. A new dict."""
        resolved: dict[str, Any] = json.loads(_core.engine_description(self._handle))
        return resolved

    def _unit(self, name: str) -> int:
        number = self._units.get(name)
        if number is None:
            raise NotFound(f"there is no unit {name!r}; {there_are(name, self._units)}")
        return number

    def _views(self, unit: int) -> Block:
        views = {self._names[i]: array_over(*_core.engine_param(self._handle, i)) for i in self._of_unit[unit]}
        return Block(views, "the parameter", f"unit {self.units[unit]!r}")

    @contextmanager
    def forward(self, unit: str) -> Iterator[Mapping[str, Any]]:
        """A unit's forward: its parameters are valid inside the block. Collective.

        Yields
        ------
        mapping of str to array
            The parameters by name, in float16 or bfloat16 with "fp16" or "bf16": read-only views, valid only inside the
            block. Delete variables that hold one before it ends.

        Raises
        ------
        InvalidState
            A backward is in progress; views are still held at the end of the block; or a parameter is accessed after
            it.
        Mismatch
            Another rank enters a different unit.

        Between steps, after `eval`, it gives the values of the model. An exception in the block leaves the unit
        unsharded: enter it again to continue.
        """
        number = self._unit(unit)
        _core.engine_forward(self._handle, number)
        params = self._views(number)
        try:
            yield params
        finally:
            params.end()
        _core.engine_forward_done(self._handle, number)

    @contextmanager
    def backward(self, unit: str) -> Iterator[tuple[Mapping[str, Any], Grads]]:
        """A unit's backward: write its gradients inside the block. Collective.

        At the end of the block all of them are ready (see `ready`), and are reduced in the background unless the pass
        is not reduced.

        Yields
        ------
        params : mapping of str to array
            As for `forward`.
        grads : mapping of str to array
            The gradients, in the dtype of the parameters. If `adds_gradients`, add to what they hold; otherwise
            overwrite it: they are uninitialised then and may hold NaN.

        Raises
        ------
        InvalidState
            `step` was not called after the previous backward pass, or views are still held at the end of the block.
        Mismatch
            Another rank enters a different unit.

        An exception in the block leaves the unit in its backward: enter it again to continue.
        """
        number = self._unit(unit)
        _core.engine_backward(self._handle, number)
        left = self._backward[number].left if number in self._backward else set(self._of_unit[number])
        params = self._views(number)
        views = {self._names[i]: array_over(*_core.engine_grad(self._handle, i)) for i in self._of_unit[number]}
        grads = Block(views, "the gradient of", f"unit {unit!r}")
        del views
        opened = self._backward[number] = _Backward(params, grads, left)
        try:
            yield params, Grads(grads, f"unit {unit!r}")
        finally:
            opened.end()
        _core.engine_unit_ready(self._handle, number)
        del self._backward[number]

    def ready(self, *names: str) -> None:
        """Mark gradients as ready before the end of their unit's `backward`, as soon as each is written.

        At stage 0 its reduction can then begin. Do not touch a gradient afterwards. With the last one of a unit its
        block's views end.

        Raises
        ------
        InvalidState
            A gradient was marked ready twice, or its unit is not in its backward; or views of the unit are still held.
        NotFound
            There is no such parameter.
        """
        for name in names:
            number = self._number(name)
            opened = self._backward.get(self._unit_of[number])
            is_last = opened is not None and opened.left == {number}
            if opened is not None and is_last:
                opened.end()
            _core.engine_ready(self._handle, number, is_last)
            if opened is not None:
                opened.left.discard(number)

    def _number(self, name: str) -> int:
        try:
            return _core.engine_find(self._handle, name)
        except InvalidArgument:
            raise NotFound(f"there is no parameter {name!r}; {there_are(name, self._names)}") from None

    def backward_done(self) -> None:
        """End a backward pass: return when its gradients are reduced or accumulated. Collective.

        Gradients that are not ready count as zeros, unless "ignore_unused_parameters" is false.

        Raises
        ------
        InvalidState
            Gradients are not ready, and "ignore_unused_parameters" is false; the message names them. Or views are
            still held.
        TesseraTimeout, PeerLost, Aborted
            A rank is late or lost; the message names it.
        """
        _core.engine_backward_done(self._handle)
        self._backward.clear()

    def step(self) -> bool:
        """End a micro-step, after each backward pass outside `no_sync`. Collective.

        At a boundary the gradients are unscaled and clipped, the optimizer makes a step, gradients become zero, and
        the schedule moves on. If the gradients of any rank have an infinity or NaN, and the configuration skips such
        steps, parameters and schedule are unchanged.

        Returns
        -------
        bool
            Whether the optimizer made a step; the same on every rank.

        Raises
        ------
        InvalidState
            There was no backward pass, or it is not done; in `no_sync`; or the loss scale must shrink below its
            minimum.
        """
        return _core.engine_step(self._handle)

    @property
    def loss_factor(self) -> float:
        """What the loss is multiplied by before its backward pass: the loss scale over the accumulation."""
        return _core.engine_loss_factor(self._handle)

    @property
    def adds_gradients(self) -> bool:
        """Whether this backward pass must add its gradients to what their memory holds, instead of overwriting it."""
        return _core.engine_adds_gradients(self._handle)

    @property
    def is_boundary(self) -> bool:
        """Whether the next `step` is one of the optimizer."""
        return _core.engine_is_boundary(self._handle)

    def set_boundary(self, boundary: bool | None) -> None:
        """Override from now on whether steps are boundaries; None restores what the accumulation says.

        Raises
        ------
        InvalidState
            From the beginning of a backward pass to its step.
        """
        _core.engine_set_boundary(self._handle, boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block are not reduced, and `step` is refused; at stages 0 and 1.

        The first pass after the block reduces the sums. Enter and leave it between passes, on every rank alike.

        Raises
        ------
        InvalidState
            In another such block, from stage 2 on, or from the beginning of a backward pass to its step.
        """
        _core.engine_begin_no_sync(self._handle)
        try:
            yield
        except BaseException:
            with suppress(InvalidState):  # it stays on in a pass that was left; the exception itself says more
                _core.engine_end_no_sync(self._handle)
            raise
        _core.engine_end_no_sync(self._handle)

    def train(self, mode: bool = True) -> None:
        """Set whether backward passes follow, as at first."""
        _core.engine_set_training(self._handle, mode)

    def eval(self) -> None:
        """No backward passes follow: the end of each `forward` shards its unit."""
        self.train(False)

    @property
    def training(self) -> bool:
        """Whether backward passes follow."""
        return _core.engine_is_training(self._handle)

    @property
    def counts(self) -> EngineCounts:
        """The counters."""
        return EngineCounts(*_core.engine_counters(self._handle))

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradients of all ranks at the last boundary, before clipping and without the loss scale.

        None if there was no boundary yet or "compute_grad_norm" is false; infinite if the step was skipped.
        """
        norm = _core.engine_grad_norm(self._handle)
        return None if math.isnan(norm) else norm

    @property
    def lr(self) -> float:
        """The learning rate of the next step. Set it alike on every rank; a schedule sets it again after each step."""
        return _core.engine_lr(self._handle)

    @lr.setter
    def lr(self, lr: float) -> None:
        _core.engine_set_lr(self._handle, lr)

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1 without "fp16"."""
        return _core.engine_loss_scale(self._handle)

    @property
    def train_batch_size(self) -> int:
        """Samples of all ranks per step of the optimizer: micro-batch times accumulation times ranks.

        Setting it, to a multiple of micro-batch times ranks, changes the accumulation. Set it alike on every rank,
        while no gradients have accumulated.
        """
        return _core.engine_batch(self._handle)[0]

    @train_batch_size.setter
    def train_batch_size(self, size: int) -> None:
        _core.engine_set_train_batch_size(self._handle, size)

    @property
    def train_micro_batch_size(self) -> int:
        """Samples of a rank per backward pass. Setting it, as `train_batch_size`, changes the train batch."""
        return _core.engine_batch(self._handle)[1]

    @train_micro_batch_size.setter
    def train_micro_batch_size(self, size: int) -> None:
        _core.engine_set_train_micro_batch_size(self._handle, size)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Backward passes per step of the optimizer."""
        return _core.engine_batch(self._handle)[2]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, for its settings; the engine makes its steps. A new object, usable after the close."""
        return Optimizer._adopt(_core.engine_optimizer(self._handle))

    @property
    def schedule(self) -> LRSchedule | None:
        """The schedule, whose steps the engine makes; None if there is none. A new object, usable after the close."""
        return LRSchedule._adopt(_core.engine_lr_schedule(self._handle)) if self._has_schedule else None

    def close(self) -> None:
        """Refuse further calls. The memory is freed once no view, no optimizer and no state uses it."""
        _core.engine_destroy(self._handle)

    def __repr__(self) -> str:
        closed = " (closed)" if self.closed else ""
        return f"<tessera.Engine of {len(self._names)} parameters in {len(self._units)} units{closed}>"


class _Backward(NamedTuple):
    """A unit in its backward."""

    params: Block
    grads: Block
    left: set[int]  # parameters whose gradients are not ready

    def end(self) -> None:
        self.params.end()
        self.grads.end()


@takes(_options.LOSS_SCALE)
class LossScale(Closable):
    """DeepSpeed's loss scale, for trainers that check gradients and make steps without an `Engine`.

    Multiply each loss by `value`, and call `update` after each step. A dynamic scale halves after `hysteresis`
    overflows and doubles after `window` steps without one. Each rank has its own; they stay equal if all get the
    same updates.

    Parameters
    ----------
    <options>

    Examples
    --------
    >>> scale = LossScale(initial=4, hysteresis=1)
    >>> scale.update(overflow=True)
    2.0
    >>> scale.value
    2.0
    """

    _handle: _core.LossScale

    def __init__(self, **options: Unpack[LossScaleOptions]) -> None:
        self._handle = _core.loss_scale_create(**raw(_options.LOSS_SCALE, options))

    @property
    def value(self) -> float:
        """The factor for losses."""
        return _core.loss_scale_value(self._handle)

    def update(self, overflow: bool) -> float:
        """End a step.

        Parameters
        ----------
        overflow : bool
            Whether the gradients of any rank had an infinity or NaN; the same on every rank.

        Returns
        -------
        float
            The next scale.

        Raises
        ------
        InvalidState
            It must halve, but is at its minimum; nothing has changed.
        """
        return _core.loss_scale_update(self._handle, overflow)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, a plain value for a `State`: scale, iteration, last_overflow and hysteresis."""
        return dict(zip(_STATE, _core.loss_scale_get_state(self._handle), strict=True))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned. A fixed scale is unchanged.

        Raises
        ------
        InvalidArgument
            A value is missing or out of range; nothing has changed.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a {type(state).__name__}; it must be a dict")
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise InvalidArgument(f"the state of a loss scale lacks {', '.join(missing)}; it has {', '.join(_STATE)}")
        _core.loss_scale_set_state(self._handle, *(state[name] for name in _STATE))

    def close(self) -> None:
        """Refuse further calls."""
        _core.loss_scale_destroy(self._handle)

    def __repr__(self) -> str:
        return "<tessera.LossScale (closed)>" if self.closed else f"<tessera.LossScale of {self.value:g}>"


_STATE = ("scale", "iteration", "last_overflow", "hysteresis")


def _text_of(config: Config) -> str:
    """The text or the path, which the library reads: so a rank that cannot read it fails the creation on all."""
    if isinstance(config, Mapping):
        return _json_of(config)
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"config is a {type(config).__name__}; it must be a dict, the text of a ds_config or a path")
    return os.fsdecode(config)


def _json_of(config: Mapping[str, Any]) -> str:
    try:
        return json.dumps(config, indent=2, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        where = _not_finite(config) if "float" in str(error) else None
        said = f"{where}; JSON has only finite numbers" if where else str(error)
        raise InvalidArgument(f"config cannot be written as JSON: {said}") from None


def _not_finite(value: Any, path: str = "") -> str | None:
    """The key of the first number that is infinite or NaN, and the number."""
    if isinstance(value, Mapping):
        parts = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    else:
        number = value.item() if isinstance(value, np.generic) else value
        return f'"{path}" is {number}' if isinstance(number, float) and not math.isfinite(number) else None
    return next((found for key, item in parts if (found := _not_finite(item, key))), None)


def _plain(value: Any) -> Any:
    """What JSON has for other mappings and for NumPy's numbers."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no value of JSON: {value!r}")
