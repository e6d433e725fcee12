"""PyTorch's own, under the module name that it uses."""

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
