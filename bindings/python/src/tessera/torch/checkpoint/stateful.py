"""The protocol of objects that know their own state, under the module name that PyTorch uses."""

from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["Stateful"]
