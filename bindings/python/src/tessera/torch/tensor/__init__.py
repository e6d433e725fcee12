"""PyTorch's DTensor under PyTorch's module name, so that a program changes only its imports.

Every name here is PyTorch's own; DTensors work over process groups of any backend, "tessera" included.
`tessera.torch.tensor.parallel` wraps PyTorch's tensor parallelism where it fails silently.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    init_device_mesh,
    linspace,
    logspace,
    ones,
    rand,
    randn,
    zeros,
)

if TYPE_CHECKING:
    from . import parallel

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "linspace",
    "logspace",
    "ones",
    "parallel",
    "rand",
    "randn",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """Import `parallel` on first use."""
    if name != "parallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
