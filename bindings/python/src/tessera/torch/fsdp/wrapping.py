"""The preparation of `FullyShardedDataParallel` before it shards: ranks, inner wrappers and initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from ...errors import InvalidArgument, InvalidState, Unsupported
from .hooks import unit_of

__all__ = ["from_rank_0", "give_values", "ignored_of", "mesh_of", "wrap_below"]


def mesh_of(strategy: ShardingStrategy, group: Any, mesh: DeviceMesh | None) -> DeviceMesh:
    """The ranks, as `fully_shard` takes them."""
    hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    if mesh is None:
        if hybrid:
            raise Unsupported(f"{strategy.name} needs a device_mesh of two dimensions, replicas by shards")
        if isinstance(group, tuple):
            raise Unsupported("two process groups are not supported; pass a device_mesh of two dimensions")
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise InvalidState("torch.distributed is not initialised; call init_process_group first")
        mesh = DeviceMesh.from_group(group, "cpu")
    if mesh.ndim != (2 if hybrid else 1) and strategy is not ShardingStrategy.NO_SHARD:
        raise InvalidArgument(f"the device_mesh has {mesh.ndim} dimensions; {strategy.name} needs {2 if hybrid else 1}")
    if strategy is ShardingStrategy.NO_SHARD and mesh.ndim == 1:
        ranks = dist.get_process_group_ranks(mesh.get_group())
        mesh = DeviceMesh("cpu", torch.tensor(ranks).view(-1, 1), mesh_dim_names=("replicate", "shard"))
    return mesh


def ignored_of(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> set[nn.Parameter]:
    """The parameters of both."""
    if modules is not None and states is not None:
        raise InvalidArgument("ignored_modules and ignored_states cannot be combined")
    ignored: set[nn.Parameter] = set()
    for one in [*(modules or ()), *(states or ())]:
        ignored |= set(one.parameters()) if isinstance(one, nn.Module) else {one}
    return ignored


def wrap_below(
    module: nn.Module, policy: Any, options: dict[str, Any], ignored: set[nn.Parameter], wrap: type[nn.Module]
) -> None:
    """Wrap the submodules that a policy of `torch.distributed.fsdp.wrap` selects, innermost first; never `module`."""
    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(module, {one for one in module.modules() if unit_of(one) is not None}, {})
        targets = {one: own for one, own in chosen.items() if one is not module}
    else:
        targets = {one: {} for one in _by_function(module, policy, ignored, wrap)}
    for parent in reversed(list(module.modules())):
        for name, child in list(parent.named_children()):
            if child in targets and not isinstance(child, wrap) and unit_of(child) is None:
                setattr(parent, name, wrap(child, **{**options, **targets[child]}))


def _by_function(
    root: nn.Module, policy: Callable[..., bool], ignored: set[nn.Parameter], wrap: type[nn.Module]
) -> list[nn.Module]:
    """The modules that a function of (module, recurse, nonwrapped_numel) selects."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """The number of elements below that get a wrapper."""
        own = sum(param.numel() for param in module.parameters() if param not in ignored)
        if isinstance(module, wrap):
            return own
        wrapped = 0
        if policy(module=module, recurse=True, nonwrapped_numel=own):
            wrapped = sum(visit(child) for child in module.children())
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=own - wrapped):
            chosen.append(module)
            return own
        return wrapped

    visit(root)
    return chosen


def give_values(module: nn.Module, init: Callable[[nn.Module], None] | None, ignored: set[nn.Parameter]) -> None:
    """Initialise parameters on the meta device with `init` or their module's own ``reset_parameters``."""
    for one in module.modules():
        own = [p for p in one._parameters.values() if p is not None and p not in ignored]
        if not any(param.is_meta for param in own):
            continue
        if init is not None:
            init(one)
        elif hasattr(one, "reset_parameters"):
            one.to_empty(device="cpu", recurse=False)
            one.reset_parameters()
        else:
            raise InvalidArgument(
                f"a {type(one).__name__} has parameters on the meta device but no reset_parameters; pass param_init_fn"
            )


def from_rank_0(module: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Broadcast parameters that are not sharded yet, and buffers, from rank 0. Collective."""
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    tensors = [p.detach() for p in module.parameters() if p not in ignored and not isinstance(p, DTensor)]
    for tensor in [*tensors, *(buffer.detach() for buffer in module.buffers())]:
        for group in reversed(groups):
            dist.broadcast(tensor, group_src=0, group=group)
