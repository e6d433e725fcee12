"""One rank of the peer: PyTorch DCP with its best settings. Takes commands on standard input (see checkpoint.py)."""

from __future__ import annotations

import os
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_worker import Workload, serve
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

warnings.filterwarnings("ignore")


class Dcp:
    def __init__(self, rank: int, world_size: int, workload: Workload) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
        self.arrays = workload.local_arrays(rank, world_size)
        self.state = {
            name: DTensor.from_local(torch.from_numpy(array), mesh, [Shard(0)]) for name, array in self.arrays.items()
        }

    def barrier(self) -> None:
        dist.barrier()

    def save(self, directory: str) -> None:
        writer = FileSystemWriter(directory, thread_count=2, sync_files=True, per_thread_copy_ahead=64 << 20)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(self.state, storage_writer=writer, planner=planner)

    def load(self, directory: str) -> None:
        dcp.load(self.state, storage_reader=FileSystemReader(directory))

    def local(self) -> dict[str, np.ndarray]:
        return self.arrays

    def close(self) -> None:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Dcp, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
