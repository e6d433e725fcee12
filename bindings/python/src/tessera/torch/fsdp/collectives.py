"""Tessera's collectives for PyTorch's own `fully_shard`, whatever the backend of its groups.

    from tessera.torch.fsdp import AllGather, ReduceScatter
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_custom_all_gather(AllGather())
            module.set_custom_reduce_scatter(ReduceScatter())

They have no effect if the group's own backend is "tessera".
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["AllGather", "ReduceScatter"]

_ours: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _ours_of(group: Any) -> Any:
    """A group of the same ranks with Tessera's backend. Collective over them the first time."""
    if type(group._get_backend(torch.device("cpu"))).__module__.startswith("tessera"):
        return group
    found = _ours.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        found = _ours[group] = dist.new_group(ranks, backend="tessera", use_local_synchronization=True)
    return found


class _Collective:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Collective):
    """For ``set_custom_all_gather`` of PyTorch's modules. Errors are Tessera's and name ranks."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Like `torch.distributed.all_gather_into_tensor`."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=_ours_of(group), async_op=async_op)


class ReduceScatter(_Collective):
    """For ``set_custom_reduce_scatter`` of PyTorch's modules."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Like `torch.distributed.reduce_scatter_tensor`."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=_ours_of(group), async_op=async_op)
