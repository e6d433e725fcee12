"""This rank among those of its host."""

from __future__ import annotations

import os

import torch.distributed as dist

__all__ = ["get_local_rank"]


def get_local_rank() -> int:
    """LOCAL_RANK, or the rank of a job without a launcher."""
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0))
