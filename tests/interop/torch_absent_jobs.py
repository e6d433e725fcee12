"""A job of which the last rank does not come to where the others meet: run by test_torch_hangs.py.

usage: torch_absent_jobs.py init | groups
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import tessera.torch  # noqa: F401
import torch
import torch.distributed as dist
from tessera.torch import DistributedDataParallel
from torch_ranks import patience

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SOON = timedelta(seconds=patience(2))
LONG = timedelta(seconds=patience(60))


def stay_away() -> None:
    if rank == world_size - 1:
        signal.pause()  # until it is killed


def groups() -> None:
    """Of groups that are parts of the job: ranks 1 to the last; the first and the last, over which DDP meets."""
    dist.init_process_group("gloo", timeout=LONG)
    ends = dist.new_group([0, world_size - 1], timeout=SOON)
    dist.barrier()
    stay_away()
    if rank == 0:
        DistributedDataParallel(torch.nn.Linear(2, 2), process_group=ends)
    dist.new_group(list(range(1, world_size)), timeout=SOON, backend="tessera")


if sys.argv[1] == "init":
    stay_away()
    # Rank 0 serves the store: it must not give up before the others, some of which may have begun later.
    dist.init_process_group("tessera", timeout=SOON if rank else 3 * SOON)
else:
    groups()
