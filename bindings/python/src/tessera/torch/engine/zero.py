"""DeepSpeed's `zero` module: contexts around the parameters of stage 3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...errors import Unsupported
from ..slices import is_slice

__all__ = ["GatheredParameters", "Init"]


@contextmanager
def Init(*_: Any, **__: Any) -> Iterator[None]:
    """A block that makes a module. No effect: `initialize` shards the module; until then each rank holds all of it."""
    yield


@contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: Any = None,
    enabled: bool = True,
) -> Iterator[None]:
    """A block in which parameters are complete; at its end all ranks get those of `modifier_rank`.

    Raises
    ------
    Unsupported
        The parameters are sharded: `initialize` was called at stage 1 to 3, or with fp16 or bf16.
    """
    del fwd_module
    some = [params] if isinstance(params, torch.Tensor) else list(params)
    if enabled and any(is_slice(param) for param in some):
        raise Unsupported(
            "GatheredParameters of sharded parameters is not supported; read one by param.full_tensor(), on all ranks, "
            "and change parameters before initialize(), or load them by load_checkpoint()"
        )
    yield
    if enabled and modifier_rank is not None and dist.is_initialized():
        for param in some:
            dist.broadcast(param.data, modifier_rank)
