"""Sums of sparse tensors over the ranks, for embedding gradients."""

from __future__ import annotations

import torch

from .. import _core
from .views import Views

__all__ = ["sum_of_ranks"]


def sum_of_ranks(comm: _core.Comm, tensor: torch.Tensor) -> torch.Tensor:
    """The coalesced sum of the ranks' tensors, which must be `torch.sparse_coo` of one shape. Collective.

    Gathers the entries of all ranks and adds them here, so that the data sent grows with the entries and not with the
    shape. All ranks get the same bits.
    """
    own = tensor.detach().coalesce()
    parts = [own.indices().t().contiguous(), own.values().contiguous()]
    views = Views()
    counts = torch.empty(_core.comm_world_size(comm), dtype=torch.int64)
    count = torch.tensor([own._nnz()])
    _core.comm_all_gather(comm, views.reads(count), views.writes(counts), False)
    wholes = [torch.empty((int(counts.sum()), *part.shape[1:]), dtype=part.dtype) for part in parts]
    for part, whole in zip(parts, wholes, strict=True):
        into = [views.writes(of_rank) for of_rank in whole.split(counts.tolist())]
        _core.comm_all_gather_v(comm, views.reads(part), into, False)
    with torch.no_grad():
        return torch.sparse_coo_tensor(wholes[0].t(), wholes[1], tensor.shape, check_invariants=True).coalesce()
