"""One rank of a peer, with its best settings: PyTorch DCP, or at one rank safetensors or torch.save.

DCP writes with two threads (or one, where asked), syncs its files and caches its plans. Flat shards are given to it as
FSDP1's flat parameters, one tensor a unit, which is less work than the boxes of the original tensors that ours saves,
and cannot be loaded into another layout. The two others sync what they wrote; what they read is copied into the tensors
that exist, which is how a trainer resumes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_worker import in_part, scratch, serve
from checkpoint_workload import Piece, Share
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

warnings.filterwarnings("ignore")

Write = Callable[[dict[str, torch.Tensor], Path], None]
Read = Callable[[Path], dict[str, torch.Tensor]]


def tensor_of(bits: np.ndarray) -> torch.Tensor:
    if bits.itemsize == 2:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits.view(np.float32))


class Dcp:
    def __init__(self, share: Share, pieces: dict[str, list[Piece]]) -> None:
        dist.init_process_group("gloo", rank=share.rank, world_size=share.world_size)
        mesh = init_device_mesh("cpu", (share.world_size,))

        def sharded(local: torch.Tensor, shape: tuple[int, ...], dim: int) -> torch.Tensor:
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(local, mesh, [Shard(dim)], shape=torch.Size(shape), stride=stride)

        self.state: dict[str, torch.Tensor] = {}
        if share.placement == "flat":
            for name, unit in share.units().items():
                memory = next(held[0].bits.base for held in (pieces[tensor.name] for tensor in unit) if held)
                total = sum(int(np.prod(tensor.shape)) for tensor in unit)
                self.state[name] = sharded(tensor_of(memory), (total,), 0)
        else:
            for tensor in share.tensors():
                local = tensor_of(pieces[tensor.name][0].bits)
                if share.placement != "replicated":
                    local = sharded(local, tensor.shape, 1 if share.placement == "columns" else 0)
                self.state[tensor.name] = local
        self.part = {name: self.state[name] for name in in_part(list(self.state))}

    def barrier(self) -> None:
        dist.barrier()

    def save(self, number: str, threads: int = 2) -> str:
        path = str(scratch() / f"dcp-{number}")
        writer = FileSystemWriter(path, thread_count=threads, sync_files=True, per_thread_copy_ahead=64 << 20)
        dcp.save(self.state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        return path

    def save_by_one_thread(self, number: str) -> str:
        return self.save(number, threads=1)

    def load(self, path: str) -> None:
        dcp.load(self.state, storage_reader=FileSystemReader(path))

    def load_part(self, path: str) -> None:
        dcp.load(self.part, storage_reader=FileSystemReader(path))

    def close(self) -> None:
        dist.destroy_process_group()


class OneFile:
    """A library of one process and one file."""

    def __init__(self, share: Share, pieces: dict[str, list[Piece]], write: Write, read: Read) -> None:
        assert share.world_size == 1
        self.write, self.read = write, read
        self.state = {name: tensor_of(held[0].bits) for name, held in pieces.items()}

    def barrier(self) -> None:
        """Of one rank there is nothing to wait for."""

    def save(self, number: str) -> str:
        path = scratch() / number
        path.mkdir()
        self.write(self.state, path / "file")
        for durable in (path / "file", path):
            file = os.open(durable, os.O_RDONLY)
            os.fsync(file)
            os.close(file)
        return str(path)

    def load(self, path: str) -> None:
        for name, tensor in self.read(Path(path) / "file").items():
            self.state[name].copy_(tensor)

    def close(self) -> None:
        """Nothing is held between the calls."""


LIBRARIES = {
    "dcp": Dcp,
    "safetensors": partial(OneFile, write=save_file, read=load_file),
    "torch.save": partial(OneFile, write=torch.save, read=partial(torch.load, mmap=True, weights_only=True)),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(LIBRARIES[sys.argv[1]])
