"""What PyTorch saves for test_torch_dcp.py: run under torchrun's environment, one process a rank, over Gloo.

usage: torch_jobs.py JOB DIRECTORY. Writes DIRECTORY/checkpoint by torch.distributed.checkpoint, and rank 0 writes
DIRECTORY/whole.pt with every tensor gathered, to compare with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_ranks import leave


class Net(nn.Module):
    """Sizes that no number of ranks divides, a buffer, a scalar parameter and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        return torch.as_tensor(self.down(torch.relu(self.up(hidden))).square().mean())


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss = model(torch.arange(8) + step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def plain() -> dict[str, Any]:
    model = Net()
    return {
        **states(model, trained(model)),
        "step": 7,
        "betas": (0.9, 0.95),
        "name": "größer",
        "blob": b"\x00\xff\x80",
        "large": 2**70,
        "scheduler": {"last": [1, 2.5, None], "empty": {}, "deep": {"flag": True}},
        "mixed": [{"weight": torch.arange(4.0)}, 3],
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 5),
        "half": torch.arange(5).to(torch.float16),
        "brain": torch.arange(5).to(torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "bytes": torch.arange(200).to(torch.uint8),
        "odd": torch.arange(3).to(torch.float8_e4m3fn),
        "path": Path("/somewhere"),
    }


def fsdp() -> dict[str, Any]:
    model = Net()
    for layer in (model.up, model.down):
        fully_shard(layer)
    fully_shard(model)
    return {**states(model, trained(model)), "world_size": dist.get_world_size()}


def ddp() -> dict[str, Any]:
    torch.manual_seed(5)
    model = nn.parallel.DistributedDataParallel(Net())
    return states(model, trained(model))


def mesh() -> dict[str, Any]:
    """Tensor parallel inside, FSDP outside: strided shards on a 2 x 2 mesh."""
    torch.manual_seed(6)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 14), nn.Linear(14, 5))
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    shape = torch.arange(7 * 9.0).reshape(7, 9)
    return {
        "model": model.state_dict(),
        "rows": distribute_tensor(shape, grid, [Shard(0), Replicate()]),
        "both": distribute_tensor(shape, grid, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(shape, grid, [Shard(0), Shard(0)]),
        "few": distribute_tensor(torch.arange(3.0), grid, [Shard(0), Shard(0)]),
    }


def hf() -> dict[str, Any]:
    """Tensors alone, of every dtype that safetensors has, cut over the ranks or not."""
    model = Net()
    fully_shard(model.up)
    fully_shard(model)
    grid = init_device_mesh("cpu", (dist.get_world_size(),))
    names = "uint8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float64 float8_e4m3fn float8_e5m2 complex64"
    whole = {name: (torch.arange(7 * 3) % 50).reshape(7, 3).to(getattr(torch, name)) for name in names.split()}
    return {
        "model": model.state_dict(),
        "whole": whole,
        "cut": {name: distribute_tensor(whole[name], grid, [Shard(0)]) for name in ("int64", "bfloat16", "float64")},
        "columns": distribute_tensor(whole["float64"], grid, [Shard(1)]),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
    }


def gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [gathered(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    job, directory = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(4)
    dist.init_process_group("gloo")
    state = {"plain": plain, "ddp": ddp, "fsdp": fsdp, "mesh": mesh, "hf": hf}[job]()
    if job == "hf":
        writer = dcp.HuggingFaceStorageWriter(path=str(directory / "checkpoint"), save_distributed=True)
        dcp.save(state, storage_writer=writer)
    else:
        dcp.save(state, checkpoint_id=directory / "checkpoint")
    whole = gathered(state)
    if dist.get_rank() == 0:
        torch.save(whole, directory / "whole.pt")
    leave()


if __name__ == "__main__":
    main()
