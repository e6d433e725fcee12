"""PyTorch's preparation of a tensor-parallel module for its own DDP, under PyTorch's module name."""

from torch.distributed.tensor.parallel.ddp import _localize_dtensor, _pre_dp_module_transform, _reconstruct_dtensor

__all__ = ["_localize_dtensor", "_pre_dp_module_transform", "_reconstruct_dtensor"]
