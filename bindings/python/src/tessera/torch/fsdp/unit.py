"""The parameters of one call of `fully_shard`, which are unsharded together while their modules compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ... import _core
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
        self.is_root = False
        self.syncs = True
        self.all_reduces = True
        self.factor = 1.0
        self.core_options: Mapping[str, Any] = {}  # of the root: more options of `tessera.FSDP`
        self.forward_prefetch: Sequence[Unit] | None = None
        self.backward_prefetch: Sequence[Unit] | None = None
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

    def show_whole(self, handle: _core.FSDP) -> None:
        """Show unsharded parameters in its modules."""
        if not self.shows_whole:
            for param in self.params:
                param.make_whole(handle)
            self.shows_whole = True

    def show_sharded(self) -> None:
        """Show this rank's rows in its modules."""
        if self.shows_whole:
            for param in self.params:
                param.make_sharded()
            self.shows_whole = False
