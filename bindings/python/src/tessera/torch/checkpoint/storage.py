"""Re-exports of PyTorch's own, under PyTorch's module name."""

from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)

__all__ = [
    "StorageReader",
    "StorageWriter",
    "WriteResult",
]
