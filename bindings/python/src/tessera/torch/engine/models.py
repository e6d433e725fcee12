"""The module that an engine trains, in one of two forms, which the engine uses alike.

`Replicated` is stage 0 in the parameters' own dtypes: DDP. `Sharded` is all the rest: `fully_shard`, whose shards are
what the optimizer updates. At stage 1 parameters stay unsharded from forward to backward, and gradients accumulate
unsharded until the last pass before a step; from stage 2 on every pass reduces them into the shards; at stage 3
parameters are sharded after forward too. Stage 0 with fp16 or bf16 is `Sharded` over groups of one rank: replicas with
float32 parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..._core import comm_broadcast
from ...errors import InvalidArgument
from ..ddp import DistributedDataParallel
from ..fsdp import FSDPModule, fully_shard
from ..fsdp.hooks import unit_of
from ..meeting import own_communicator
from ..slices import local
from ..tensors import CORE
from ..views import Views
from .settings import Settings

__all__ = ["Replicated", "Sharded", "make_model"]


class Replicated(DistributedDataParallel):
    """A module under DDP with the engine's options."""

    keeps_gradients = True  # they are views of the buckets, and are set to zero in place

    def __init__(self, module: nn.Module, group: Any, settings: Settings) -> None:
        self._core_options = {
            "op": settings.op,
            "pre_divide": settings.pre_divide(dist.get_world_size(group)),
            "reduce_dtype": None if settings.grad_dtype is None else CORE[settings.grad_dtype],
        }
        super().__init__(
            module,
            process_group=group,
            find_unused_parameters=settings.fills_missing,
            forward_sync_buffers=False,
        )

    def begin_pass(self, reduces: bool) -> None:
        """A backward pass begins."""
        self.require_backward_grad_sync = reduces
        self._gradients.begin(reduces)

    def watch(self, loss: torch.Tensor) -> None:
        """The pass ends even if this rank's loss depends on no parameter."""
        loss.register_hook(self._gradients.backward_begins)


class Sharded:
    """A module under `fully_shard`, which is the module itself."""

    keeps_gradients = False

    def __init__(self, module: nn.Module, group: Any, settings: Settings, mesh: DeviceMesh | None) -> None:
        ranks = dist.get_world_size(group)
        if mesh is None:
            mesh = _mesh_of(group, replicas=settings.stage == 0)
        elif settings.stage == 0 and mesh.ndim == 1:
            raise InvalidArgument(
                'stage 0 with fp16 or bf16 and tensor parallelism is not supported; use "zero_optimization": '
                '{"stage": 1}, or keep the parameters\' own dtypes'
            )
        if ranks % settings.secondary_ranks:
            raise InvalidArgument(
                f"zero_hpz_partition_size is {settings.secondary_ranks}, which does not divide the {ranks} "
                "data-parallel ranks"
            )
        reshards: bool | int | None = False
        if settings.stage == 3:
            reshards = settings.secondary_ranks if settings.secondary_ranks > 1 else None
        dtypes = {"param_dtype": settings.dtype, "reduce_dtype": settings.grad_dtype}
        inner = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        outer = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=settings.casts_inputs)
        for unit in _units_of(module):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshards, mp_policy=inner)
        if unit_of(module) is None:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards, mp_policy=outer)
        root = unit_of(module)
        assert root is not None and isinstance(module, FSDPModule)
        root.core_options = {"op": settings.op, "pre_divide": settings.pre_divide(ranks)}
        self._module = module

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._module(*inputs, **kwargs)

    def begin_pass(self, reduces: bool) -> None:
        """A backward pass begins."""
        assert isinstance(self._module, FSDPModule)
        self._module.set_requires_gradient_sync(reduces)

    def watch(self, loss: torch.Tensor) -> None:
        """Units that this rank does not use take part at the end of a pass that reaches any."""


def make_model(module: nn.Module, group: Any, settings: Settings, mesh: DeviceMesh | None) -> Replicated | Sharded:
    """All ranks of the group get the parameters and buffers of its first one. Collective. `mesh`: the data-parallel
    ranks in a mesh of several dimensions; by a second one of one rank for replicas."""
    if settings.stage == 0 and settings.dtype is None:
        return Replicated(module, group, settings)
    for one in [*module.parameters(), *module.buffers()]:
        if settings.dtype is None or not one.is_floating_point():
            continue
        # The optimizer updates float32 parameters; buffers take part in the computation.
        one.data = one.data.to(torch.float32 if isinstance(one, nn.Parameter) else settings.dtype)
    _begin_alike(module, group)
    return Sharded(module, group, settings, mesh)


def _begin_alike(module: nn.Module, group: Any) -> None:
    """Give all ranks the parameters and buffers of the group's first rank. Collective."""
    tensors = [local(one).detach() for one in [*module.parameters(), *module.buffers()] if local(one).numel()]
    comm = own_communicator(group, "the engine's parameters")
    try:
        views = Views()
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            of_dtype = [views.updates(tensor) for tensor in tensors if tensor.dtype is dtype]
            comm_broadcast(comm._handle, of_dtype, 0, False)
        views.finish()
    finally:
        comm.close()


def _mesh_of(group: Any, replicas: bool) -> DeviceMesh:
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return init_device_mesh("cpu", (len(ranks), 1) if replicas else (len(ranks),))
    if not replicas:
        return DeviceMesh.from_group(group, "cpu")
    raise InvalidArgument(
        'stage 0 with fp16 or bf16 needs all ranks of the job; use "zero_optimization": {"stage": 1}, or keep the '
        "parameters' own dtypes"
    )


def _units_of(module: nn.Module) -> Iterator[nn.Module]:
    """The members of lists and sequences of modules, such as a model's layers, that share no parameter with anything
    else. None if the program has sharded modules itself."""
    if any(unit_of(one) is not None for one in module.modules()):
        return
    members: list[nn.Module] = []
    _collect(module, members, set())
    owners: dict[int, set[int]] = {}
    inside: set[nn.Module] = set()
    for number, member in enumerate(members):
        inside.update(member.modules())
        for param in member.parameters():
            owners.setdefault(id(param), set()).add(number)
    for one in module.modules():
        for param in one.parameters(recurse=False) if one not in inside else ():
            owners.setdefault(id(param), set()).add(-1)
    for member in members:
        own = list(member.parameters())
        if own and all(len(owners[id(param)]) == 1 for param in own):
            yield member


def _collect(module: nn.Module, members: list[nn.Module], seen: set[nn.Module]) -> None:
    for child in module.children():
        if child in seen:
            continue
        seen.add(child)
        is_member = isinstance(module, (nn.ModuleList, nn.Sequential))
        if is_member and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            members.append(child)
        else:
            _collect(child, members, seen)
