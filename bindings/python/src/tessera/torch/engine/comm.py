"""DeepSpeed's `comm` module: `torch.distributed` under its names, and the start of the default process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_backend,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from ...errors import InvalidArgument

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_backend",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

# DeepSpeed's names of backends for devices; here parameters are in CPU memory.
_OF_DEVICES = ("nccl", "ccl", "hccl", "cncl", "sccl", "xccl")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise `torch.distributed`, unless it is already. Collective.

    Parameters
    ----------
    dist_backend : str, optional
        By default "tessera", which is also used for backends of devices, such as "nccl".
    auto_mpi_discovery : bool
        Take ranks from the variables of Open MPI, MPICH or Slurm if RANK is not set.
    distributed_port : int
        The port of rank 0, unless MASTER_PORT is set.
    verbose
        No effect.
    timeout : timedelta, optional
        The group's; by default DEEPSPEED_TIMEOUT minutes, or PyTorch's default.
    init_method : str, optional
        As for ``init_process_group``.
    dist_init_required : bool, optional
        If False, it must be initialised already.
    config
        No effect.
    rank, world_size : int
        Of this process; by default those of the launcher. A process without a launcher is alone.
    """
    del verbose, config
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise InvalidArgument("dist_init_required is False, but torch.distributed is not initialised")
    if auto_mpi_discovery and "RANK" not in os.environ:
        _take_ranks_of_mpi()
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if timeout is None and minutes is not None:
        try:
            timeout = timedelta(minutes=float(minutes))
        except (ValueError, OverflowError):
            raise InvalidArgument(f"DEEPSPEED_TIMEOUT is {minutes!r}; it must be a number of minutes") from None
    backend = "tessera" if dist_backend is None or dist_backend.lower() in _OF_DEVICES else dist_backend
    given: dict[str, Any] = {"timeout": timeout, "init_method": init_method}
    if rank >= 0 or world_size >= 0:
        given |= {"rank": rank, "world_size": world_size}
    elif "RANK" not in os.environ and init_method is None:
        given |= {"rank": 0, "world_size": 1, "store": dist.HashStore()}
        del given["init_method"]
    dist.init_process_group(backend, **given)


def get_local_rank() -> int:
    """This rank among those of its host: LOCAL_RANK, or the rank of a job without a launcher."""
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0))


def _take_ranks_of_mpi() -> None:
    for of_rank, of_size, of_local in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if of_rank not in os.environ or int(os.environ.get(of_size, "1")) < 2:
            continue
        os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ[of_rank], os.environ[of_size]
        os.environ.setdefault("LOCAL_RANK", os.environ.get(of_local, "0"))
        if "MASTER_ADDR" not in os.environ:
            raise InvalidArgument(
                f"{of_rank} says that this is rank {os.environ[of_rank]} of {os.environ[of_size]}, but MASTER_ADDR is "
                f"not set; set it to the host of rank 0 (this host is {socket.gethostname()!r})"
            )
        return
