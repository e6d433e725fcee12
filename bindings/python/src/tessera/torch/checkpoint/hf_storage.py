"""PyTorch's own, under the module name that it uses."""

from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

__all__ = [
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
]
