"""Re-exports of PyTorch's own, under PyTorch's module name."""

from torch.distributed.checkpoint.api import (
    CheckpointException,
)

__all__ = [
    "CheckpointException",
]
