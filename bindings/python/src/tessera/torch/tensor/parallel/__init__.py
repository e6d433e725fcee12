"""PyTorch's tensor parallelism, with errors where PyTorch's own continues with a wrong model.

    from tessera.torch.tensor.parallel import ...  # was: from torch.distributed.tensor.parallel import ...

    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

Layers, DTensors and collectives are PyTorch's. `parallelize_module`, `ColwiseParallel`, `RowwiseParallel`,
`SequenceParallel` and `loss_parallel` wrap PyTorch's; the other names are PyTorch's own. docs/TORCH.md lists the
differences.
"""

from typing import Any

from torch.distributed.tensor import parallel as _theirs

from .api import parallelize_module
from .indices import IndexOutOfRange
from .loss import loss_parallel
from .style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "IndexOutOfRange",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]


def __getattr__(name: str) -> Any:
    """Names that PyTorch's package has besides, of whatever version is installed."""
    if name.startswith("_") or not hasattr(_theirs, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_theirs, name)
