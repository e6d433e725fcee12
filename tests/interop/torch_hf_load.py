"""What PyTorch loads for test_hf_layouts.py: run under torchrun's environment, one process a rank, over Gloo.

usage: torch_hf_load.py DIRECTORY WHOLE. PyTorch's own HuggingFaceStorageReader puts the tensors of DIRECTORY into
DTensors, cut by rows and then by columns, where they have any; each rank compares its parts with those of WHOLE, a file
of torch.save.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_ranks import bits, leave


def part_of(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's, as `Shard(dim)` cuts it."""
    parts = list(whole.chunk(dist.get_world_size(), dim))
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole.narrow(dim, 0, 0)


def load_cut_by(dim: int, directory: str, wanted: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
    expected = {name: part_of(value, dim) if value.ndim > dim else value for name, value in wanted.items()}
    state = {
        name: DTensor.from_local(
            torch.zeros_like(expected[name], memory_format=torch.contiguous_format),
            mesh,
            [Shard(dim) if value.ndim > dim else Replicate()],
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        for name, value in wanted.items()
    }
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(directory))
    for name, tensor in state.items():
        got = tensor.to_local()
        assert got.shape == expected[name].shape, (name, dim, got.shape)
        assert bits(got) == bits(expected[name]), f"rank {dist.get_rank()}: {name} cut by dimension {dim}"


def main() -> None:
    directory, whole = sys.argv[1:]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = torch.load(whole)
    for dim in (0, 1):
        load_cut_by(dim, directory, wanted, mesh)
    print(f"rank {dist.get_rank()}: {len(wanted)} tensors", flush=True)
    leave()


if __name__ == "__main__":
    main()
