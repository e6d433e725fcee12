"""Hooks of the modules under `fully_shard`: they tell the engine what computes, and make it at the first forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...errors import InvalidState
from .engine import Engine
from .sharded import Sharded
from .unit import Unit

__all__ = ["ATTRIBUTE", "HookedUnit", "unit_of"]

ATTRIBUTE = "_tessera_fsdp_unit"  # of modules


def unit_of(module: nn.Module) -> HookedUnit | None:
    """The unit of a module; None if `fully_shard` was not called for it."""
    return module.__dict__.get(ATTRIBUTE)


class HookedUnit(Unit):
    """A unit whose modules have the hooks."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[Sharded],
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        reshards: bool | int | None,
    ) -> None:
        super().__init__(modules, params, mesh, policy, reshards)
        self.engine: Engine | None = None
        self._left: set[nn.Module] = set(self.modules)  # to compute, before the unit is sharded again
        for param in self.params:
            param.accumulated = self._accumulated
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_load)

    def begun(self) -> Engine | None:
        """The engine, created with this unit's modules as the root if there is none. None if there is nothing to
        shard."""
        if self.engine is None:
            begin(self)
        return self.engine

    # ------------------------------------------------------------ hooks, which torch.compile leaves as they are

    @torch.compiler.disable
    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        engine = self.begun()
        if self.is_root and engine is not None and not engine.running:
            engine.begin_forward()
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), self.policy.param_dtype)
        if engine is not None:
            self.computing += not engine.running  # a recomputed forward may end early
        if engine is not None and self.params:
            engine.forward(self)
            if torch.is_grad_enabled():
                args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    @torch.compiler.disable
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        engine = self.engine
        if engine is not None:
            self.computing -= not engine.running
        if engine is not None and self.params:
            self._left.discard(module)
            if not self._left or not torch.is_grad_enabled():
                self._left = set(self.modules)
                if not engine.running:
                    self._end_forward(engine)
        if self.policy.output_dtype is not None:
            output = _cast(output, self.policy.output_dtype)
        if engine is not None and self.params and torch.is_grad_enabled():
            watched = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
            if watched:
                register_multi_grad_hook(watched, lambda _grad: engine.backward(self), mode="any")
        return output

    def _end_forward(self, engine: Engine) -> None:
        reshards = not self.is_root if self.reshards is None else self.reshards
        if reshards is True or not torch.is_grad_enabled():
            engine.reshard(self)
        elif reshards is not False:
            engine.keep(self)

    def _watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Watch the gradients of the inputs, which mark the end of this forward's backward."""
        leaves, spec = tree_flatten((args, kwargs))
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not watched:
            self.has_no_inputs = True
            return args, kwargs
        self.passes += 1
        through = _Inputs.apply(self._inputs_done, *(leaves[i] for i in watched))
        for i, leaf in zip(watched, through, strict=True):
            leaves[i] = leaf
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def _inputs_done(self) -> None:
        self.passes -= 1
        if self.engine is not None:
            self.engine.hand_over_if_complete(self)

    def _accumulated(self, param: Sharded) -> None:
        if self.engine is not None:
            self.engine.accumulated(self, param)

    def _before_state_dict(self, *_: Any) -> None:
        if self.engine is not None and self.shows_whole:
            self.engine.reshard(self)

    def _before_load(self, *_: Any) -> None:
        self._before_state_dict()


class _Inputs(torch.autograd.Function):
    """Passes the inputs of a module through unchanged and calls back when their gradients are available."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.done = done
        return tuple(one.view_as(one) for one in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.done()
        return None, *grads


def begin(root: HookedUnit) -> None:
    """Create the engine for the units at and below `root`."""
    units: dict[int, HookedUnit] = {id(root): root}
    for top in root.modules:
        for module in top.modules():
            unit = unit_of(module)
            if unit is not None:
                units.setdefault(id(unit), unit)
    for unit in units.values():
        if unit.engine is not None:
            raise InvalidState(
                f"{unit.name!r} has computed on its own before the module that contains it; run that module first"
            )
    with_params = [unit for unit in units.values() if unit.params]
    root.is_root = True
    if not with_params:
        return
    engine = Engine(root, with_params)
    for unit in units.values():
        unit.engine = engine


def _cast(values: Any, dtype: torch.dtype) -> Any:
    leaves, spec = tree_flatten(values)
    cast = [leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return tree_unflatten(cast, spec)
