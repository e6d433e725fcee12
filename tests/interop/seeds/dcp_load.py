"""The second program of "Getting Started with Distributed Checkpoint (DCP)": the saved state goes into an FSDP model.

What differs from the document is in README.md beside this file.
"""

import os
import sys

import tessera.torch.checkpoint as dcp
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from tessera.torch.checkpoint.state_dict import get_state_dict, set_state_dict
from tessera.torch.fsdp import FullyShardedDataParallel as FSDP

CHECKPOINT_DIR = "checkpoint"


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "12355 ")

    # initialize the process group
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def run_fsdp_checkpoint_load_example(rank, world_size):
    print(f"Running basic FSDP checkpoint loading example on rank {rank}.")
    setup(rank, world_size)

    # create a model
    model = ToyModel()
    model = FSDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    # generates the state dict we will load into
    model_state_dict, optimizer_state_dict = get_state_dict(model, optimizer)
    state_dict = {"model": model_state_dict, "optimizer": optimizer_state_dict}
    dcp.load(
        state_dict=state_dict,
        checkpoint_id=CHECKPOINT_DIR,
    )
    # sets our state dicts on the model and optimizer, now that we've loaded
    set_state_dict(model, optimizer, model_state_dict=model_state_dict, optim_state_dict=optimizer_state_dict)

    cleanup()


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    print(f"Running fsdp checkpoint example on {world_size} devices.")
    mp.spawn(
        run_fsdp_checkpoint_load_example,
        args=(world_size,),
        nprocs=world_size,
        join=True,
    )
