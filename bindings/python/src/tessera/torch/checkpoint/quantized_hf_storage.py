"""PyTorch's own, under the module name that it uses."""

from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader,
)

__all__ = [
    "QuantizedHuggingFaceStorageReader",
]
