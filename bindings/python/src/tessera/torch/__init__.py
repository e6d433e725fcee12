"""Tessera under PyTorch's own names. Needs PyTorch; `import tessera` does not.

`tessera.torch.checkpoint` is PyTorch's Distributed Checkpoint over Tessera's engine; `tessera.torch.c10d` is the
backend "tessera" of `torch.distributed`; `DistributedDataParallel` is PyTorch's over Tessera's own, and so is
`tessera.torch.fsdp.fully_shard`; `allreduce_hook` averages gradients of PyTorch's, whatever its backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "tessera.torch needs PyTorch, which this Python does not have: pip install torch", name=_missing.name
    ) from _missing

from . import c10d
from .ddp import DistributedDataParallel, GradBucket
from .ddp_hook import allreduce_hook, register_allreduce_hook

if TYPE_CHECKING:
    from . import checkpoint, fsdp

del _torch

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "allreduce_hook",
    "c10d",
    "checkpoint",
    "fsdp",
    "register_allreduce_hook",
]


def __getattr__(name: str) -> Any:
    """Imports `checkpoint` and `fsdp` on first use: PyTorch's beneath them take a second, which a process group can do
    without."""
    if name not in ("checkpoint", "fsdp"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
