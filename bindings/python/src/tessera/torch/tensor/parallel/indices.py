"""Indices into a dimension that the ranks share: who has which of them, and a check that they exist at all.

A rank skips indices that belong to other ranks. Without the check, an index that belongs to no rank would be skipped
everywhere, and the result would be zeros.
"""

from __future__ import annotations

import torch

from ....errors import InvalidArgument

__all__ = ["IndexOutOfRange", "check_range", "share_of"]


class IndexOutOfRange(InvalidArgument, IndexError):
    """An id is outside the vocabulary, or a target is outside the classes. PyTorch's undistributed functions raise
    `IndexError` there."""


def share_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first index and the number of indices of a rank, cut as `torch.chunk` does: later ranks may have fewer, or
    none."""
    each = -(-size // ranks)
    first = min(rank * each, size)
    return first, min(each, size - first)


def check_range(indices: torch.Tensor, size: int, what: str) -> None:
    """Raise `IndexOutOfRange` unless all indices are from 0 to ``size - 1``. Only looks at CPU memory."""
    if torch.compiler.is_compiling() or indices.device.type != "cpu" or indices.numel() == 0:
        return
    smallest, largest = (int(one) for one in torch.aminmax(indices))
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise IndexOutOfRange(f"{what} {wrong} is out of range: it must be from 0 to {size - 1}")
