"""PyTorch's own, under the module name that it uses."""

from torch.distributed.checkpoint.fsspec_filesystem import (
    FsspecReader,
    FsspecWriter,
)

__all__ = [
    "FsspecReader",
    "FsspecWriter",
]
