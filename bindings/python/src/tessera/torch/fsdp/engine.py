"""The steps of a tree of modules under `fully_shard`, from the first forward of its root.

    a module's forward begins     its unit is unsharded, and unsharding of the next units begins
    ... ends                      the unit is sharded again, unless it stays unsharded
    a gradient of its output      backward begins: the unit is unsharded again
    its last gradient             its gradients are reduced into the shards, once those of its inputs are complete too
    the end of the pass           units whose inputs have no gradient, or which got no gradient; then all gradients are
                                  reduced

Autograd itself reports the gradients that its pass will produce (`Unit.await_gradients`). A pass inside another one,
such as that of a reentrant checkpoint, may produce more gradients for a unit whose gradients are being reduced: the
unit then has another backward, and its results are added.

Everything runs on the thread that calls forward and backward, in the order in which autograd reaches the modules. All
ranks compute the same modules, so the order is the same on all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.autograd import Variable

from ... import _core
from ...comm import Comm
from ...errors import Aborted, Interrupted, InvalidState, Mismatch, TesseraError, Unsupported
from ...fsdp import FSDP, Deferred
from ..meeting import own_communicator
from ..tensors import core_dtype
from .sharded import Sharded
from .unit import Unit

__all__ = ["Engine"]


class Engine:
    """The units of a root, in the core. Collective.

    Parameters
    ----------
    root : Unit
        Names of parameters are relative to its first module.
    units : sequence of Unit
        The units with parameters, in the order of their modules.
    """

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        top = root.modules[0]
        names = {module: name for name, module in top.named_modules()}
        self.root = root
        self.units = list(units)
        first = self.units[0]
        for unit in self.units[1:]:
            if unit.mesh != first.mesh:
                raise Unsupported(
                    f"fully_shard got the mesh {first.mesh} for one module and {unit.mesh} for another; use one mesh "
                    "for all modules of a root"
                )
        for unit in self.units:
            unit.name = names[unit.modules[0]] or type(top).__name__
            for param in unit.params:
                module, attribute = param.places[0]
                param.name = f"{names[module]}.{attribute}".lstrip(".")
        self._group = _group_of(first.mesh)
        self._failed = False
        self.running = False  # a backward pass is running, and its end will call back
        self.sync = True
        self.reduces = True  # the shards get their gradients at the end of this pass
        self._begin_core()

    def _begin_core(self) -> None:
        self.comm = own_communicator(self._group, "fully_shard", self._make)
        self.handle = self.core._handle
        number = 0
        for u, unit in enumerate(self.units):
            unit.number = u
            for param in unit.params:
                param.begin(self.handle, number)
                number += 1
        self._end = weakref.finalize(self, _closed, self.core, self.comm)

    def _make(self, comm: Comm) -> None:
        first = self.units[0]
        self.core = FSDP(
            comm,
            {
                unit.name: {
                    param.core_name: Deferred(param.core_shape, core_dtype(param.shown.dtype).name)
                    for param in unit.params
                }
                for unit in self.units
            },
            frozen=[param.core_name for unit in self.units for param in unit.params if not param.shown.requires_grad],
            # For the other units, each pass tells the core when to shard them again.
            keep_whole=[unit.name for unit in self.units if unit.kept_among is None],
            keep_among={unit.name: unit.kept_among for unit in self.units if unit.kept_among is not None},
            shard_ranks=0 if first.mesh.ndim == 1 else first.mesh.size(1),
            param_dtype=_names_of(self.units, "param_dtype"),
            reduce_dtype=_names_of(self.units, "reduce_dtype"),
            sync_values=False,
            **self.root.core_options,
        )

    def _do(self, act: Callable[..., None], *arguments: Any) -> None:
        """A call of the core that may wait for other ranks.

        Raises
        ------
        TesseraError
            The first failure, which may have been the unsharding of another unit in the background.
        """
        try:
            act(self.handle, *arguments)
        except (Interrupted, InvalidState):
            raise  # nothing has happened to the model
        except TesseraError as error:
            cause = error.__cause__ if isinstance(error, Aborted) and not self._failed else None
            first = cause if isinstance(cause, TesseraError) else error
            self._failed = True
            if isinstance(first, Mismatch):  # others may wait for a different call of this rank, which will not come
                self.comm.abort(str(first))
            raise first from first.__cause__

    # ------------------------------------------------------------ units

    def _bring(self, units: Sequence[Unit]) -> None:
        """Give the core the current shards of these units. The root's forward has done so for all units, and a backward
        needs those."""
        if not self.running and not self.root.computing:
            for unit in units:
                for param in unit.params:
                    param.bring()

    def unshard(self, unit: Unit) -> None:
        """Begin to unshard a unit."""
        self._bring([unit])
        self._do(_core.fsdp_unshard, unit.number)

    def wait_for(self, unit: Unit) -> None:
        """Wait until a unit is unsharded, and show it unsharded in its modules."""
        self._do(_core.fsdp_await, unit.number)
        unit.show_whole(self.handle)

    def reshard(self, unit: Unit) -> None:
        """Shard a unit, and show it sharded in its modules."""
        if unit.in_backward:
            raise InvalidState(f"{unit.name!r} is in its backward and cannot be resharded until backward() returns")
        unit.show_sharded()
        self._do(_core.fsdp_reshard, unit.number)

    def keep(self, unit: Unit) -> None:
        """Keep a unit among `kept_among` ranks, and show it sharded in its modules."""
        unit.show_sharded()
        self._do(_core.fsdp_forward_done, unit.number)

    # ------------------------------------------------------------ a step

    def forward(self, unit: Unit) -> None:
        """A module of the unit begins to compute."""
        if self.running:  # activations are recomputed
            self.backward(unit)
            return
        self._bring(self.units)  # unsharding of the next one begins too
        if unit.forward_prefetch is not None:
            self.unshard(unit)
            for other in unit.forward_prefetch:
                self.unshard(other)
        self._do(_core.fsdp_forward, unit.number)
        unit.show_whole(self.handle)

    def backward(self, unit: Unit) -> None:
        """Gradients of the unit's output are available."""
        if not self.running:
            self._begin_backward()
        unit.await_gradients()
        if unit.in_backward:
            return
        if unit.backward_prefetch is not None:
            self.unshard(unit)
            for other in unit.backward_prefetch:
                if not other.in_backward and not other.handed_over:
                    self.unshard(other)
        self._do(_core.fsdp_backward, unit.number)
        unit.in_backward = True
        unit.show_whole(self.handle)

    def _begin_backward(self) -> None:
        sync = {unit.syncs for unit in self.units}
        all_reduce = {unit.all_reduces for unit in self.units}
        if len(sync) > 1 or len(all_reduce) > 1:
            raise Unsupported(
                "set_requires_gradient_sync and set_requires_all_reduce hold for all modules of a root; call them on "
                "the root"
            )
        (self.sync,), (everywhere,) = sync, all_reduce
        mesh = self.units[0].mesh
        everywhere = everywhere or mesh.size() == mesh.size(mesh.ndim - 1)
        self.reduces = self.sync and everywhere
        _core.fsdp_set_sync(self.handle, self.sync)
        _core.fsdp_set_all_reduce(self.handle, everywhere)
        trained = [param for unit in self.units for param in unit.trained]
        adds = any(param.sharded.grad is not None for param in trained)
        _core.fsdp_set_accumulate(self.handle, adds)
        for unit in self.units:
            _core.fsdp_set_reshard_after_backward(self.handle, unit.number, unit.reshards_after_backward)
        if adds:
            for param in trained:
                param.check_own_gradient()
        self.running = True
        Variable._execution_engine.queue_callback(partial(_ended, weakref.ref(self)))

    def accumulated(self, unit: Unit, param: Sharded) -> None:
        """Autograd has added to the gradient of a whole parameter."""
        self.backward(unit)
        unit.awaited.discard((unit.await_gradients(), param))
        self.hand_over_if_complete(unit)

    def hand_over_if_complete(self, unit: Unit) -> None:
        if unit.is_complete:
            self.hand_over(unit)

    def hand_over(self, unit: Unit) -> None:
        """Begin to reduce the unit's gradients into the shards."""
        if not unit.in_backward:
            return
        adds = unit.holds_sums or not self.sync
        for param in unit.trained:
            param.hand_over(self.handle, adds, unit.factor)
        unit.show_sharded()
        unit.in_backward = False
        unit.handed_over = True
        unit.holds_sums = not self.sync and bool(unit.trained)
        self._do(_core.fsdp_grads_ready, unit.number)

    def end(self) -> None:
        """End the backward pass: return when the gradients of the shards are reduced."""
        self.running = False
        for unit in self.units:
            if not unit.in_backward and not unit.handed_over and unit.trained and self.sync:
                self._take_part(unit)
            self.hand_over(unit)
            unit.show_sharded()
        self._do(_core.fsdp_wait)
        for unit in self.units:
            unit.handed_over = False
            unit.forget_pass()
            if self.reduces:
                for param in unit.trained:
                    param.give_gradient(self.handle)

    def _take_part(self, unit: Unit) -> None:
        """Begin the backward of a unit that this rank did not use, but others may have."""
        self._do(_core.fsdp_backward, unit.number)
        unit.in_backward = True

    def abandon(self) -> None:
        """Abandon the current step."""
        self.running = False
        self.reduces = True
        self.root.computing = 0
        for unit in self.units:
            unit.show_sharded()
            unit.in_backward = unit.handed_over = unit.holds_sums = False
            unit.computing = 0
            unit.forget_pass()
            for param in unit.params:
                if param.whole is not None:
                    param.whole.grad = None
        self._do(_core.fsdp_abandon)

    def begin_forward(self) -> None:
        """Begin the root's forward. Replaced parameters (load_state_dict(assign=True)) give their values to the shards.
        If a parameter was unfrozen, the core gets a new model that has a gradient for it."""
        unfrozen = []
        self.root.computing = 0
        for unit in self.units:
            unit.computing = 0
            for param in unit.params:
                param.adopt()
                if param.is_unfrozen:
                    unfrozen.append(param.name)
        self._bring(self.units)
        if not unfrozen:
            return
        if not self.reduces or any(unit.holds_sums for unit in self.units):
            raise InvalidState(
                f"{unfrozen[0]!r} was unfrozen while gradients of earlier passes are not reduced; reduce them by a "
                "backward with synchronisation, or drop them with reset_iter_state()"
            )
        for unit in self.units:
            unit.show_sharded()
        former = self._end
        self._begin_core()
        former()


def _group_of(mesh: Any) -> Any:
    """The ranks of a mesh, in its order."""
    if mesh.ndim == 1:
        return mesh.get_group()
    wanted = mesh.mesh.flatten().tolist()
    if mesh.mesh_dim_names is not None:
        group = mesh._flatten().get_group()
    elif wanted == list(range(dist.get_world_size())):
        group = dist.group.WORLD
    else:
        group = dist.new_group(wanted, use_local_synchronization=True)
    ranks = dist.get_process_group_ranks(group)
    if ranks != wanted:
        raise Unsupported(f"the mesh {mesh} has its ranks in another order than its group {ranks}")
    return group


def _names_of(units: Sequence[Unit], setting: str) -> dict[str, str]:
    given = ((unit.name, getattr(unit.policy, setting)) for unit in units)
    return {name: core_dtype(dtype).name for name, dtype in given if dtype is not None}


def _closed(core: FSDP, comm: Comm) -> None:
    core.close()
    comm.close()


def _ended(self: weakref.ref[Engine]) -> None:
    if (engine := self()) is not None:
        engine.end()
