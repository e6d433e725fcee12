"""The parameters of one call of `fully_shard`: whole together, while their modules compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ... import _core
from .sharded import Sharded

__all__ = ["Unit"]


class Unit:
    """The parameters of these modules, and of those below them that are no other unit's."""

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
        self.reshards = reshards  # after forward; None: unless it is the root's; a number: see kept_among
        self.kept_among = None if reshards is None or isinstance(reshards, bool) else reshards  # so many ranks each
        self.name = ""
        self.number = -1
        self.is_root = False
        self.syncs = True
        self.all_reduces = True
        self.factor = 1.0
        self.forward_prefetch: Sequence[Unit] | None = None
        self.backward_prefetch: Sequence[Unit] | None = None
        self.reshards_after_backward = True  # its memory is another's then
        self.shows_whole = False
        self.in_backward = False
        self.handed_over = False  # in this backward pass
        self.holds_sums = False  # of passes without synchronisation
        self.passes = 0  # forward passes whose backward has yet to come to the inputs
        self.has_no_inputs = False  # with gradients, at times: only the end of the pass tells that nothing more comes
        self.asked: set[int] = set()  # passes of autograd; one may run inside another, as a reentrant checkpoint's does
        self.awaited: set[tuple[int, Sharded]] = set()  # gradients, with the pass that will bring them
        self.computing = 0  # forwards of its modules that have begun and not ended, unless one was left by an error

    @property
    def trained(self) -> list[Sharded]:
        """Those of its parameters that the core has a gradient of."""
        return [param for param in self.params if param.trained]

    def await_gradients(self) -> int:
        """Ask autograd, at the first event of its pass, which parameters that will bring gradients of. Return the
        pass."""
        task = int(torch._C._current_graph_task_id())
        if task not in self.asked:
            self.asked.add(task)
            self.awaited.update((task, param) for param in self.trained if param.will_get_gradient())
        return task

    @property
    def is_complete(self) -> bool:
        """Whether its gradients of this backward are. More may come all the same, of a pass that begins later."""
        return not self.awaited and self.passes <= 0 and not self.has_no_inputs

    def forget_pass(self) -> None:
        """A backward has ended, or was given up."""
        self.passes = 0
        self.asked.clear()
        self.awaited.clear()

    def show_whole(self, handle: _core.FSDP) -> None:
        """Its modules show whole parameters."""
        if not self.shows_whole:
            for param in self.params:
                param.make_whole(handle)
            self.shows_whole = True

    def show_sharded(self) -> None:
        """Its modules show this rank's rows."""
        if self.shows_whole:
            for param in self.params:
                param.make_sharded()
            self.shows_whole = False
