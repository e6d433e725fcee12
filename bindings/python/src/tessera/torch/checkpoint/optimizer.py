"""PyTorch's own function for the sharded state of an FSDP optimizer, under PyTorch's module name."""

from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

__all__ = ["load_sharded_optimizer_state_dict"]
