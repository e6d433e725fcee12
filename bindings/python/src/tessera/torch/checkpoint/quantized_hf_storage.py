"""Re-exports of PyTorch's own, under PyTorch's module name."""

from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader,
)

__all__ = [
    "QuantizedHuggingFaceStorageReader",
]
