"""PyTorch's pipeline parallelism, run by `tessera.Pipeline`.

    from tessera.torch.pipelining import ...  # was: from torch.distributed.pipelining import ...

    stage = PipelineStage(layers, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)

Stages, tracing by `pipeline` and chunk specs are PyTorch's own. The schedules are subclasses of PyTorch's, with its
signatures; Tessera's executor moves activations and gradients, which may have other shapes in each micro-batch.
docs/TORCH.md lists the differences.
"""

from typing import Any

from torch.distributed import pipelining as _theirs
from torch.distributed.pipelining import (
    Pipe,
    PipelineStage,
    PipelineStageInfo,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)

from .microbatch import TensorChunkSpec
from .schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
    get_schedule_class,
)

__all__ = [
    "Pipe",
    "PipelineStage",
    "PipelineStageInfo",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "TensorChunkSpec",
    "_ScheduleForwardOnly",
    "build_stage",
    "get_schedule_class",
    "pipe_split",
    "pipeline",
]


def __getattr__(name: str) -> Any:
    """Names that PyTorch's package has besides, of whatever version is installed."""
    if name.startswith("_") or not hasattr(_theirs, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_theirs, name)
