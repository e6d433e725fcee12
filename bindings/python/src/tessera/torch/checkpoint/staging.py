"""Re-exports of PyTorch's own, under PyTorch's module name."""

from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)

__all__ = [
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "StagingOptions",
]
