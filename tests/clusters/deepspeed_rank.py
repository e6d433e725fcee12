"""A rank that DeepSpeed's launcher started: python deepspeed_rank.py DIRECTORY BACKEND. DeepSpeed trains over BACKEND,
"gloo" or our "tessera", beside a communicator of ours in the same process."""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import numpy as np
import ranks
import tessera as ts
import tessera.torch  # registers the backend
import torch
import torch.distributed as dist


def main() -> None:
    directory, backend = Path(sys.argv[1]), sys.argv[2]
    deepspeed.init_distributed(dist_backend=backend)
    comm = ts.init()
    assert (comm.rank, comm.world_size) == (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        },
    )
    draw = torch.Generator().manual_seed(comm.rank)
    inputs, wanted = torch.randn(8, 16, generator=draw), torch.randn(8, 4, generator=draw)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(engine(inputs), wanted)
        engine.backward(loss)
        engine.step()
        # The mean over the ranks by both libraries.
        theirs, ours = loss.detach().clone(), np.array([loss.item()], np.float32)
        dist.all_reduce(theirs)
        comm.all_reduce(ours)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
        losses.append(float(ours[0]) / comm.world_size)
    weights = torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()]).numpy()
    others = weights.copy()
    comm.broadcast(others, root=0)
    ranks.report(directory, "trained", comm.rank, losses=losses, same=bool((weights == others).all()))
    comm.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
