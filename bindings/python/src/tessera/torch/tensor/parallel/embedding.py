"""The lookup of an embedding whose rows are spread over the ranks (vocabulary parallel).

Each rank looks up the ids that it has rows for and leaves zeros for the others; the sum over the ranks is the result.
PyTorch's own lookup fails on a rank without rows while the others wait, returns zeros for ids that no rank has, and
computes the gradient of all rows on each rank; here the gradient is sharded like the table.
"""

from __future__ import annotations

import types

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from .indices import check_range, share_of
from .names import name_of

__all__ = ["can_look_up", "spread_lookup"]


def can_look_up(module: nn.Embedding) -> bool:
    """Whether `spread_lookup` supports the module. PyTorch's lookup handles, or refuses, the options that need all ids
    of a row on one rank."""
    plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return plain and type(module).forward is nn.Embedding.forward


def spread_lookup(module: nn.Embedding) -> None:
    """Replace the module's forward, whose input will be a replicated DTensor of ids."""
    module.forward = types.MethodType(_lookup, module)


def _lookup(self: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    table = self.weight
    if not isinstance(table, DTensor) or not isinstance(ids, DTensor) or table.placements != (Shard(0),):
        return nn.Embedding.forward(self, ids)
    mesh, size = table.device_mesh, table.shape[0]
    first, count = share_of(size, mesh.size(), mesh.get_local_rank())
    local_ids, rows = ids.to_local(), table.to_local()
    check_range(local_ids, size, f"{name_of(self)}: the id")
    if count == 0:  # a row to look at; the table stays in the graph, so that every rank has a gradient
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    own = (local_ids >= first) & (local_ids < first + count)
    padding = self.padding_idx
    local_padding = padding - first if padding is not None and first <= padding < first + count else None
    found = nn.functional.embedding(torch.where(own, local_ids - first, 0), rows, local_padding)
    return DTensor.from_local(found.masked_fill(~own.unsqueeze(-1), 0), mesh, [Partial()], run_check=False)
