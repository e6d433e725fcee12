"""Tessera under PyTorch's own names. Requires PyTorch; `import tessera` does not.

`tessera.torch.checkpoint` is PyTorch's Distributed Checkpoint on Tessera's engine; `tessera.torch.c10d` is the
backend "tessera" of `torch.distributed`; `DistributedDataParallel` and `tessera.torch.fsdp.fully_shard` have PyTorch's
API on Tessera's implementation; `tessera.torch.pipelining` has PyTorch's pipeline schedules on Tessera's executor;
`tessera.torch.engine` is DeepSpeed's engine under its names;
`tessera.torch.tensor.parallel` is PyTorch's tensor parallelism with more checks; `tessera.torch.metrics` has metrics of
tensors; `clip_grad_norm_` clips gradients that ranks hold in different ways; `allreduce_hook` averages gradients of
PyTorch's own DDP, whatever its backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "tessera.torch requires PyTorch, which is not installed; run pip install torch", name=_missing.name
    ) from _missing

from . import c10d, metrics
from .ddp import DistributedDataParallel, GradBucket
from .ddp_hook import allreduce_hook, register_allreduce_hook
from .norm import clip_grad_norm_

if TYPE_CHECKING:
    from . import checkpoint, engine, fsdp, pipelining, tensor

del _torch

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "allreduce_hook",
    "c10d",
    "checkpoint",
    "clip_grad_norm_",
    "engine",
    "fsdp",
    "metrics",
    "pipelining",
    "register_allreduce_hook",
    "tensor",
]


def __getattr__(name: str) -> Any:
    """Import these modules on first use: PyTorch's modules beneath them take a second to import."""
    if name not in ("checkpoint", "engine", "fsdp", "pipelining", "tensor"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
