"""PyTorch's hooks that shard saved activations over the tensor-parallel ranks, under PyTorch's module name."""

from torch.distributed.tensor.parallel.input_reshard import input_reshard

__all__ = ["input_reshard"]
