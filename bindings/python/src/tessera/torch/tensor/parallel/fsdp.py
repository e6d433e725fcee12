"""PyTorch's extension of FSDP1 for DTensors, under PyTorch's module name."""

import torch.distributed.fsdp  # noqa: F401  (first: PyTorch's module below cannot be the one that imports it)
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

__all__ = ["DTensorExtensions"]
