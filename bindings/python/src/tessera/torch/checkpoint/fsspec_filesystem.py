"""Re-exports of PyTorch's own, under PyTorch's module name."""

from torch.distributed.checkpoint.fsspec_filesystem import (
    FsspecReader,
    FsspecWriter,
)

__all__ = [
    "FsspecReader",
    "FsspecWriter",
]
