"""The protocol of objects that provide their own state, under PyTorch's module name."""

from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["Stateful"]
