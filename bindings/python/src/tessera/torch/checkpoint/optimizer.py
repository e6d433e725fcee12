"""PyTorch's own way to the sharded state of an FSDP optimizer, under the module name that it uses."""

from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

__all__ = ["load_sharded_optimizer_state_dict"]
