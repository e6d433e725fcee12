"""PyTorch's own, under the module name that it uses."""

from torch.distributed.checkpoint.api import (
    CheckpointException,
)

__all__ = [
    "CheckpointException",
]
