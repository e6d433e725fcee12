"""A job in which rank 1 does not come, where each of the ways of training communicates, until somebody opens
DIRECTORY/WAY.go: run by test_torch_hangs.py.

usage: torch_hang_jobs.py DIRECTORY [WAY...]. Of ways that are named the deadline is that of the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tessera.torch import DistributedDataParallel
from tessera.torch import checkpoint as dcp
from tessera.torch.fsdp import FullyShardedDataParallel, fully_shard
from torch import nn
from torch_ranks import patience

rank = int(os.environ["RANK"])
directory = Path(sys.argv[1])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def trains(wrapped: Any) -> Callable[[], None]:
    def step() -> None:
        wrapped(torch.ones(3, 4)).sum().backward()

    return step


def saves() -> Callable[[], None]:
    numbers = iter(range(10))
    return lambda: dcp.save({"weight": torch.ones(3)}, checkpoint_id=directory / f"step-{next(numbers)}")


def sums() -> Callable[[], None]:
    group = dist.new_group(backend="tessera")
    return lambda: dist.all_reduce(torch.ones(3), group=group)


WAYS: dict[str, Callable[[], Callable[[], None]]] = {
    "ddp": lambda: trains(DistributedDataParallel(model())),
    "fully_shard": lambda: trains(fully_shard(model())),
    "fsdp1": lambda: trains(FullyShardedDataParallel(model())),
    "checkpoint": saves,
    "c10d": sums,
}

chosen = sys.argv[2:] or list(WAYS)
given = {} if sys.argv[2:] else {"timeout": timedelta(seconds=patience(120))}
dist.init_process_group("gloo", **given)
for name in chosen:
    step = WAYS[name]()
    step()
    if rank == 1:
        (directory / f"{name}.hangs").touch()
        (directory / f"{name}.go").read_bytes()  # of a FIFO: until somebody has written into it
    step()
    dist.barrier()
dist.destroy_process_group()
