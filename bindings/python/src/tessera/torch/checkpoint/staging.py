"""PyTorch's own, under the module name that it uses."""

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
