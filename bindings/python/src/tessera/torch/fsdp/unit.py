"""The parameters of one call of `fully_shard`, which are unsharded together while their modules compute."""

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

__all__ = ["Unit"]


class Unit:
    """The parameters of these modules and of their submodules that belong to no other unit."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[Sharded],
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        reshards: bool | int | None,
    ) -> None:
        self.modules = list(modules)
        self.params = list(params)
        self.mesh = mesh
        self.policy = policy
        self.reshards = reshards  # after forward; None: unless it is the root; a number: see kept_among
        self.kept_among = None if reshards is None or isinstance(reshards, bool) else reshards  # ranks per group
        self.name = ""
        self.number = -1
        self.engine: Engine | None = None
        self.is_root = False
        self.syncs = True
        self.all_reduces = True
        self.factor = 1.0
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.reshards_after_backward = True  # then another unit may use its memory
        self.shows_whole = False
        self.in_backward = False
        self.handed_over = False  # in this backward pass
        self.holds_sums = False  # of passes without synchronisation
        self.passes = 0  # forward passes whose backward has not reached the inputs yet
        self.has_no_inputs = False  # some use had no inputs with gradients: only the end of the pass completes it
        self.asked: set[int] = set()  # autograd passes; they may be nested, as for a reentrant checkpoint
        self.awaited: set[tuple[int, Sharded]] = set()  # gradients, with the pass that will produce them
        self.computing = 0  # forwards of its modules that have begun but not ended (or failed)
        self._left: set[nn.Module] = set(self.modules)  # modules to compute before the unit is sharded again
        for param in self.params:
            param.accumulated = self._accumulated
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_load)

    @property
    def trained(self) -> list[Sharded]:
        """Its parameters that have a gradient in the core."""
        return [param for param in self.params if param.trained]

    def await_gradients(self) -> int:
        """At the first event of an autograd pass, ask autograd which parameters will get gradients. Return the pass."""
        task = int(torch._C._current_graph_task_id())
        if task not in self.asked:
            self.asked.add(task)
            self.awaited.update((task, param) for param in self.trained if param.will_get_gradient())
        return task

    @property
    def is_complete(self) -> bool:
        """Whether its gradients of this backward are complete. A pass that begins later may still produce more."""
        return not self.awaited and self.passes <= 0 and not self.has_no_inputs

    def forget_pass(self) -> None:
        """Reset after a backward has ended or was abandoned."""
        self.passes = 0
        self.asked.clear()
        self.awaited.clear()

    def show_whole(self) -> None:
        """Show unsharded parameters in its modules."""
        if not self.shows_whole:
            assert self.engine is not None
            for param in self.params:
                param.make_whole(self.engine.handle)
            self.shows_whole = True

    def show_sharded(self) -> None:
        """Show this rank's rows in its modules."""
        if self.shows_whole:
            for param in self.params:
                param.make_sharded()
            self.shows_whole = False

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


def begin(root: Unit) -> None:
    """Create the engine for the units at and below `root`."""
    from .fully_shard import unit_of

    units: dict[int, Unit] = {id(root): root}
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
