"""Tessera as a communication hook of PyTorch's own `DistributedDataParallel`, whatever its process group's backend.

    model = DistributedDataParallel(net)                 # over Gloo, say
    tessera.torch.register_allreduce_hook(model)

Annotations are evaluated in this file, because PyTorch compares those of a hook with its classes.
"""

from typing import Any

import torch
import torch.distributed as dist

from .. import _core
from ..comm import Comm
from .meeting import communicator_of
from .views import Views
from .work import future_of

__all__ = ["allreduce_hook", "register_allreduce_hook"]

_AVG = 2


def register_allreduce_hook(model: Any, comm: Comm | None = None) -> None:
    """Let Tessera average the gradients of a `DistributedDataParallel` model. Collective.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        Its parameters must be in CPU memory, and it must not have a communication hook yet.
    comm : Comm, optional
        A communicator of the same ranks as the model's process group, owned by the caller. By default one is made for
        the group and reused for its other models.

    Raises
    ------
    TesseraTimeout
        A rank of the group did not arrive in time.
    """
    state = model.process_group if comm is None else comm
    communicator_of(state)
    model.register_comm_hook(state, allreduce_hook)


def allreduce_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients; a communication hook for ``model.register_comm_hook(state, allreduce_hook)``.

    Parameters
    ----------
    state : ProcessGroup, Comm or None
        The ranks: a communicator, or a `torch.distributed` group (None for the default one), for which the first bucket
        makes a communicator.
    bucket : GradBucket
        Averaged in place, asynchronously.

    Returns
    -------
    Future of Tensor
        Holds the error if the collective fails.
    """
    views, gradients = Views(), bucket.buffer()
    work = _core.comm_all_reduce(
        communicator_of(state)._handle, [views.updates(gradients, reduced=True)], _AVG, async_op=True
    )
    assert work is not None

    def outcome() -> torch.Tensor:
        _core.work_wait(work, None)
        views.finish()
        return gradients

    return future_of([work], outcome)
