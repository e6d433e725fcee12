"""Re-exports of PyTorch's own, under PyTorch's module name."""

from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

__all__ = [
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
]
